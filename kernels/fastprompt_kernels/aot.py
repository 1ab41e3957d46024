# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel for every architecture without a GPU, and check what came out.

``python -m fastprompt_kernels.aot`` runs the host code of each op on the meta device, so that it compiles what a GPU
would be given (arguments, specialisation, tiles), and reports registers, spills, shared memory and matrix
instructions. It fails on a spill, on shared memory above the chip's limit, and on a matrix product without matrix
instructions.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastprompt_kernels import dropout_add, info_nce, mask_delta_pool, packed_attention, prompt_info_nce
from fastprompt_kernels.launcher import ARCHITECTURES, Launch, Pointer, recording
from fastprompt_kernels.roofline import write_section

WIDTHS = (384, 768, 1024)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}
MATRIX = {"sm_80": ("mma.sync",), "sm_90": ("wgmma.mma_async", "mma.sync"), "gfx942": ("v_mfma_",)}
"""Matrix instructions, the one for tiles of 64 rows and more first."""
TYPE_NAMES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64", torch.int32: "i32",
}  # fmt: skip
BEGIN, END = "<!-- begin: python -m fastprompt_kernels.aot -->", "<!-- end -->"


@dataclass(frozen=True)
class Job:
    """One compilation, picklable: how to find the launch again in another process."""

    architecture: str
    dtype: str
    specimen: str
    width: int
    number: int


@dataclass(frozen=True)
class Report:
    """What one kernel became."""

    kernel: str
    variant: str
    dtype: str
    widths: tuple[int, ...]
    architecture: str
    tile: str
    registers: int
    spills: int
    shared: int
    matrix: str
    problem: str


def _meta(*shape: int, dtype: torch.dtype, grad: bool = True) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad and dtype.is_floating_point)


def _run_info_nce(dtype: torch.dtype, width: int, **options: Any) -> None:
    hard = options.pop("hard", False)
    rows = [_meta(4096, width, dtype=dtype) for _ in range(3 if hard else 2)]
    out = info_nce(
        rows[0], rows[1], temperature=0.05, hard_negative=rows[2] if hard else None, backend="triton", **options
    )
    out.loss.backward(torch.empty_like(out.loss))


def _run_prompt(dtype: torch.dtype, width: int) -> None:
    index = torch.empty(2, 256, dtype=torch.int64, device="meta")
    states, deltas = _meta(8192, width, dtype=dtype), _meta(64, width, dtype=dtype)
    prompt_info_nce(states, index, index, deltas, temperature=0.05, backend="triton").loss.backward()
    pooled = mask_delta_pool(states, index[0], index[0], deltas, backend="triton")
    pooled.backward(torch.empty_like(pooled))


def _run_attention(
    dtype: torch.dtype, head_dim: int, max_seqlen: int, rows: bool, dropouts: tuple[float, ...]
) -> None:
    heads, tokens, sequences = 16, 8192, 256
    key, value = (_meta(tokens, heads, head_dim, dtype=dtype) for _ in range(2))
    query = _meta(sequences if rows else tokens, heads, head_dim, dtype=dtype)
    starts = torch.empty(sequences + 1, dtype=torch.int64, device="meta")
    query_rows = torch.empty(sequences, dtype=torch.int64, device="meta") if rows else None
    for dropout_p in dropouts:
        out = packed_attention(
            query, key, value, starts, max_seqlen=max_seqlen, query_rows=query_rows, dropout_p=dropout_p,
            backend="triton",
        )  # fmt: skip
        out.backward(torch.empty_like(out))


def _run_dropout_add(dtype: torch.dtype, width: int) -> None:
    values, residual = (_meta(8192, width, dtype=dtype) for _ in range(2))
    out = dropout_add(values, residual, dropout_p=0.1, seed=0, backend="triton")
    out.backward(torch.empty_like(out))


def _specimens() -> dict[str, tuple[Callable[[torch.dtype, int], None], tuple[int, ...]]]:
    """Calls of the public functions, forward and backward, and the widths to run them with."""
    specimens: dict[str, tuple[Callable[[torch.dtype, int], None], tuple[int, ...]]] = {
        "chunked": (lambda dtype, width: _run_info_nce(dtype, width, hard=True, positive_offset=0), WIDTHS),
        "symmetric": (lambda dtype, width: _run_info_nce(dtype, width, symmetric=True), WIDTHS),
        "rows": (lambda dtype, width: _run_info_nce(dtype, width, hard=True, reduction="none"), WIDTHS),
        "prompt": (_run_prompt, WIDTHS),
        "dropout": (_run_dropout_add, WIDTHS),
    }
    for length, rows, dropouts in ((32, False, (0.0, 0.1)), (64, True, (0.1,)), (128, False, (0.1,))):
        specimens[f"attention {length}"] = (
            lambda dtype, dim, length=length, rows=rows, dropouts=dropouts: _run_attention(  # type: ignore[misc]
                dtype, dim, length, rows, dropouts
            ),
            (32, 64, 128),
        )
    return specimens


def _launches(job: Job) -> list[Launch]:
    run, _ = _specimens()[job.specimen]
    with recording(job.architecture) as launches:
        run(getattr(torch, job.dtype), job.width)
    return launches


def _source(launch: Launch) -> ASTSource:
    """The launch as the just-in-time compiler would specialise it."""
    names = launch.kernel.arg_names
    values = [*launch.arguments]
    constants = {**launch.constants, **dict(launch.tile.blocks)}
    values += [constants[name] for name in names[len(values) :]]
    unspecialised = {p.name for p in launch.kernel.params if p.do_not_specialize}
    signature, constexprs, attributes = {}, {}, {}
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        divisible = False
        if isinstance(value, Pointer):
            signature[name] = "*" + TYPE_NAMES[value.dtype]
            # On a GPU allocations are aligned; a slice's offset decides whether its address is.
            divisible = value.byte_offset % 16 == 0
        elif value is None or name in constants or (isinstance(value, int) and value == 1):
            signature[name], constexprs[(i,)] = "constexpr", value
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            divisible = value % 16 == 0 and name not in unspecialised
        else:
            signature[name] = "fp32"
        if divisible:
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constexprs, attributes)


def _key(launch: Launch) -> str:
    source = _source(launch)
    return repr((launch.kernel.__name__, source.signature, source.constants, source.attrs, launch.tile))


def _compile(job: Job) -> Report:
    launch = _launches(job)[job.number]
    compiled = triton.compile(
        _source(launch),
        target=TARGETS[job.architecture],
        options={"num_warps": launch.tile.num_warps, "num_stages": launch.tile.num_stages},
    )
    kernel = launch.kernel.__name__
    source = launch.kernel.src
    registers, spills = (_hip_usage if job.architecture.startswith("gfx") else _cuda_usage)(compiled.asm)
    text = compiled.asm["amdgcn" if job.architecture.startswith("gfx") else "ptx"]
    counts = {name: len(re.findall(rf"\b{re.escape(name)}", text)) for name in MATRIX[job.architecture]}
    has_dot = re.search(r"tl\.dot\(|_scores\(", source) is not None
    ieee = job.dtype == "float32" and job.architecture != "gfx942"
    problems = []
    if spills:
        problems.append(f"{spills} bytes spilled")
    if compiled.metadata.shared > SHARED_LIMIT[job.architecture]:
        problems.append(f"{compiled.metadata.shared} bytes of shared memory, the chip has less")
    wide = dict(launch.tile.blocks).get("BLOCK_M", 0) >= 64 and job.dtype != "float32"
    expected = MATRIX[job.architecture][:1] if wide else MATRIX[job.architecture]
    if has_dot and not ieee and not any(counts[name] for name in expected):
        problems.append(f"a matrix product without {' or '.join(expected)}")
    matrix = "no product"
    if has_dot:
        matrix = ", ".join(f"{n} {name.rstrip('_')}" for name, n in counts.items() if n) or "none (IEEE float32)"
    flags = [name for name, value in launch.constants.items() if value is True]
    tile = "×".join(str(size) for _, size in launch.tile.blocks)
    return Report(
        kernel, " ".join(flags).lower(), TYPE_NAMES[getattr(torch, job.dtype)], (job.width,), job.architecture,
        f"{tile}, {launch.tile.num_warps} warps, {launch.tile.num_stages} stages",
        registers, spills, compiled.metadata.shared, matrix, "; ".join(problems),
    )  # fmt: skip


def _cuda_usage(asm: dict[str, Any]) -> tuple[int, int]:
    """(registers, bytes of stack and local memory) from the cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        text = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage:\n{text}")
    return int(found[1]), int(found[2]) + int(found[3])


def _hip_usage(asm: dict[str, Any]) -> tuple[int, int]:
    """(vector registers, bytes spilled to scratch) from the assembly's metadata."""
    values = {
        name: int(value)
        for name, value in re.findall(
            r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count|private_segment_fixed_size):\s+(\d+)", asm["amdgcn"]
        )
    }
    return values["vgpr_count"], values["private_segment_fixed_size"] + 4 * values["vgpr_spill_count"]


def jobs(architectures: tuple[str, ...] = ARCHITECTURES) -> tuple[list[Job], dict[Job, tuple[int, ...]]]:
    """Distinct compilations, and the widths that each stands for."""
    first: dict[tuple[str, str], Job] = {}
    widths: dict[Job, tuple[int, ...]] = {}
    for arch in architectures:
        for dtype in DTYPES:
            name = str(dtype).removeprefix("torch.")
            for specimen, (_, sizes) in _specimens().items():
                for width in sizes:
                    probe = Job(arch, name, specimen, width, 0)
                    for number, launch in enumerate(_launches(probe)):
                        job = first.setdefault((arch, _key(launch)), Job(arch, name, specimen, width, number))
                        if width not in widths.setdefault(job, ()):
                            widths[job] += (width,)
    return list(widths), widths


def compile_all(architectures: tuple[str, ...] = ARCHITECTURES, processes: int | None = None) -> Iterator[Report]:
    """A report for each distinct compilation, as they finish."""
    work, widths = jobs(architectures)
    count = processes or len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(count, initializer=_quiet) as pool:
        for job, report in zip(work, pool.map(_compile, work), strict=True):
            yield Report(**{**asdict(report), "widths": widths[job]})


def _quiet() -> None:
    torch.set_num_threads(1)


def table(reports: list[Report]) -> str:
    """Markdown, one row a kernel, variant, dtype and width; one column group an architecture."""
    lines = [
        "| kernel | variant | dtype | D | chip | tile | registers | spills | shared KiB | matrix instructions |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in sorted(reports, key=lambda r: (r.kernel, r.variant, r.dtype, r.architecture, r.widths)):
        lines.append(
            f"| `{r.kernel}` | {r.variant or '–'} | {r.dtype} | {', '.join(map(str, r.widths))} | {r.architecture} | "
            f"{r.tile} | {r.registers} | {r.spills} | {r.shared / 1024:.1f} | {r.matrix} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """The command; 1 if a kernel failed a check."""
    parser = argparse.ArgumentParser(
        prog="python -m fastprompt_kernels.aot",
        description="Compile every kernel for every architecture, without a GPU.",
    )
    parser.add_argument("--architecture", choices=ARCHITECTURES, action="append", help="only these (default: all)")
    parser.add_argument("--write", type=Path, help="a Markdown file whose marked section the table replaces")
    options = parser.parse_args(arguments)
    reports = []
    for report in compile_all(tuple(options.architecture or ARCHITECTURES)):
        reports.append(report)
        print(f"{len(reports):4d}  {report.architecture:7s} {report.dtype:5s} {report.kernel} {report.variant}"
              + (f"  FAILED: {report.problem}" if report.problem else ""), file=sys.stderr, flush=True)  # fmt: skip
    text = f"{len(reports)} kernels compiled by triton {triton.__version__}\n\n{table(reports)}"
    print(text)
    failed = [r for r in reports if r.problem]
    for r in failed:
        print(
            f"failed: {r.kernel} {r.variant} {r.dtype} D={r.widths} {r.architecture} {r.tile}: {r.problem}",
            file=sys.stderr,
        )
    if options.write is not None and not failed:
        write_section(options.write, BEGIN, END, text)
    return 1 if failed else 0


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("fastprompt_kernels.aot compiles, so it cannot run under TRITON_INTERPRET=1: unset it")
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # its default changes between versions
    sys.exit(main())
