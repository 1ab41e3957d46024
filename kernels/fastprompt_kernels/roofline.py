# SPDX-License-Identifier: Apache-2.0
"""How fast ``info_nce`` could be: operations, bytes, the floor they set on a chip, and kernel launches.

``python -m fastprompt_kernels.roofline`` prints the table of kernels/README.md. Launches are counted by running the
host code, and the plain expression, on the meta device; nothing here is a measurement.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fastprompt_kernels import info_nce
from fastprompt_kernels.info_nce_triton import chunk_rows
from fastprompt_kernels.launcher import recording

CHIPS = {"A100": (312e12, 2.04e12), "H100": (989e12, 3.35e12), "H200": (989e12, 4.8e12)}
"""Dense bf16 operations and bytes a second, from NVIDIA's data sheets (SXM, 80, 80 and 141 GB)."""

SIZES = (256, 1024, 4096, 16384, 65536, 131072)
WIDTH = 1024
BEGIN, END = "<!-- begin: python -m fastprompt_kernels.roofline -->", "<!-- end -->"


def work(batch: int, width: int, itemsize: int = 2) -> tuple[float, float]:
    """(floating-point operations, bytes to and from memory) of forward and backward, B = N, 16-bit rows."""
    flops = 3 * 2.0 * batch * batch * width
    rows = 2 * batch * width
    chunks = -(-batch // chunk_rows(batch, batch, torch.float16))
    prepare = rows * (itemsize + 2)  # read, write the unit rows
    logits = batch * batch * (4 + 4 + 2 + 2 + 2.0)  # write S, read it, write G, read it twice
    # A chunk reads all keys for S and all unit keys for dq; dk is written, then read and written by each later chunk.
    keys = chunks * batch * width * (itemsize + 2) + batch * width * 4 * (2 * chunks - 1)
    finish = rows * (4 + itemsize + itemsize) + batch * width * 4
    return flops, prepare + logits + keys + finish


class _CountKernels(TorchDispatchMode):
    """Counts operators that are not views or allocations: each starts at least one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not view and "empty" not in func._schema.name and "detach" not in func._schema.name:
            self.count += 1
        return result


def _rows(batch: int, width: int) -> list[Tensor]:
    return [torch.empty(batch, width, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(2)]


def launches(batch: int, width: int) -> tuple[int, int]:
    """(ours, plain torch) for forward and backward: kernels started, torch's own around ours included."""
    query, key = _rows(batch, width)
    with recording("sm_90") as kernels, _CountKernels() as ours:
        loss = info_nce(query, key, temperature=0.05, backend="triton").loss
        torch.autograd.grad(loss, (query, key), torch.empty_like(loss))
    query, key = _rows(batch, width)
    with _CountKernels() as plain:
        similarity = F.normalize(query, dim=1) @ F.normalize(key, dim=1).T / 0.05
        loss = F.cross_entropy(similarity.float(), torch.arange(batch, device="meta"))
        torch.autograd.grad(loss, (query, key), torch.empty_like(loss))
    return len(kernels) + ours.count, plain.count


def table() -> str:
    """Markdown."""
    lines = [
        f"`info_nce`, forward and backward, bf16, D = {WIDTH}, B = N. Estimates, not yet measured on a GPU.",
        "",
        "| B = N | TFLOP | GB | floor " + " | floor ".join(CHIPS) + " | bound by | launches | plain torch |",
        "|---|---|---|" + "---|" * len(CHIPS) + "---|---|---|",
    ]
    for batch in SIZES:
        flops, moved = work(batch, WIDTH)
        floors = [1e3 * max(flops / rate, moved / bandwidth) for rate, bandwidth in CHIPS.values()]
        rate, bandwidth = CHIPS["H100"]
        bound = "products" if flops / rate > moved / bandwidth else "memory"
        ours, plain = launches(batch, WIDTH)
        lines.append(
            f"| {batch:,} | {flops / 1e12:.4g} | {moved / 1e9:.3g} | "
            + " | ".join(f"{ms:.3g} ms" for ms in floors)
            + f" | {bound} | {ours} | {plain} |"
        )
    return "\n".join(lines)


def write_section(path: Path, begin: str, end: str, text: str) -> None:
    """Replace what stands between two marker lines of a file."""
    before, rest = path.read_text().split(begin)
    path.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end, 1)[1]}")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m fastprompt_kernels.roofline", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--write", type=Path, help="a Markdown file whose marked section the table replaces")
    options = parser.parse_args()
    text = table()
    print(text)
    if options.write is not None:
        write_section(options.write, BEGIN, END, text)


if __name__ == "__main__":
    main()
