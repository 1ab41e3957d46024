# SPDX-License-Identifier: Apache-2.0
"""``python -m bench.kernels``: every op of fastprompt_kernels against what else computes it.

Time: all contenders in one process, taking turns, forward and backward, median. Memory: one process a contender, the
op's own peak beyond its inputs. Error: the gradients against float64. An op whose error is red is not timed. Running
out of memory is a result. Rows go to bench/results/ as JSON and as a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from fastprompt_kernels import dropout_add, info_nce, mask_delta_pool, packed_attention, prompt_info_nce
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from torch.nn import functional as F

from bench.harness import DEVICE, RESULTS, environment, peak_mib, record, run_worker

OURS = "fastprompt"
ERROR_LIMIT = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
"""Of our gradients against float64; beyond it something is broken, and a time would mean nothing."""


@dataclass(frozen=True)
class Case:
    """One op at one size; ``sizes`` as its ``make_…`` function takes them."""

    op: str
    dtype: str
    sizes: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.op} {'×'.join(map(str, self.sizes))} {self.dtype}"


Contenders = dict[str, Callable[..., Tensor]]
"""Name → function of the input tensors that gives a scalar; the first is ours."""


def _rows(count: int, width: int, seed: int) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def make_info_nce(batch: int, width: int) -> tuple[list[Tensor], Contenders]:
    """B = N, one way, τ = 0.05."""
    query = _rows(batch, width, 1)
    target = torch.arange(batch, device=DEVICE)

    def eager(q: Tensor, k: Tensor) -> Tensor:
        # In float32: bf16 logits at 1/τ = 20 are wrong by 0.08.
        return F.cross_entropy(F.normalize(_wide(q), dim=1) @ F.normalize(_wide(k), dim=1).T / 0.05, target)

    contenders: Contenders = {
        OURS: lambda q, k: info_nce(q, k, temperature=0.05).loss,
        "eager torch": eager,
        COMPILED: _compiled(eager),
        "cross_entropy(q @ k.T)": lambda q, k: F.cross_entropy(q @ k.T, target),
    }
    if DEVICE == "cuda" and find_spec("inf_cl"):
        from inf_cl import cal_inf_loss

        contenders["inf-cl"] = lambda q, k: cal_inf_loss(F.normalize(q, dim=1), F.normalize(k, dim=1), scale=20.0)
    if DEVICE == "cuda" and find_spec("memeff"):
        from memeff import InfoNCE

        memeff = InfoNCE(temperature=0.05)
        contenders["memeff"] = lambda q, k: memeff(F.normalize(q, dim=1), F.normalize(k, dim=1))
    return [query, query + 1.5 * _rows(batch, width, 2)], contenders


def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.compile at the first call: importing the compiler takes seconds."""
    made: list[Callable[..., Tensor]] = []

    def call(*tensors: Tensor) -> Tensor:
        if not made:
            made.append(torch.compile(function, dynamic=False))
        return made[0](*tensors)

    return call


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _pool_indices(views: int, batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    mask = torch.randperm(tokens, generator=generator)[: views * batch].view(views, batch)
    return mask.to(DEVICE), torch.randint(0, 33, (views, batch), generator=generator).to(DEVICE)


def make_mask_delta_pool(batch: int, width: int) -> tuple[list[Tensor], Contenders]:
    """One sentence every 31 tokens, 33 deltas."""
    mask, delta = (t[0] for t in _pool_indices(1, batch, 31 * batch))
    upstream = _rows(batch, width, 4).to(DEVICE)

    def eager(hidden: Tensor, deltas: Tensor) -> Tensor:
        return ((hidden[mask] - deltas[delta]) * upstream.to(hidden.dtype)).sum()

    def ours(hidden: Tensor, deltas: Tensor) -> Tensor:
        return (mask_delta_pool(hidden, mask, delta, deltas) * upstream.to(hidden.dtype)).sum()

    contenders: Contenders = {OURS: ours, "eager torch": eager, COMPILED: _compiled(eager)}
    return [_rows(31 * batch, width, 1), _rows(33, width, 2)], contenders


def make_prompt_info_nce(batch: int, width: int) -> tuple[list[Tensor], Contenders]:
    """Two views, one sentence every 31 tokens, 33 deltas."""
    mask, delta = _pool_indices(2, batch, 62 * batch)
    target = torch.arange(batch, device=DEVICE)

    def eager(hidden: Tensor, deltas: Tensor) -> Tensor:
        rows = F.normalize(_wide(hidden[mask] - deltas[delta]), dim=2)
        return F.cross_entropy(rows[0] @ rows[1].T / 0.05, target)

    contenders: Contenders = {
        OURS: lambda hidden, deltas: prompt_info_nce(hidden, mask, delta, deltas, temperature=0.05).loss,
        "eager torch": eager,
        COMPILED: _compiled(eager),
    }
    return [_rows(62 * batch, width, 1), _rows(33, width, 2)], contenders


def make_packed_attention(sequences: int, heads: int, head_dim: int, dropout: int) -> tuple[list[Tensor], Contenders]:
    """Sequences of 14 to 45 tokens, as sentences in a template are; dropout in percent."""
    lengths = torch.randint(14, 46, (sequences,), generator=torch.Generator().manual_seed(1))
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(DEVICE)
    longest, total, p = int(lengths.max()), int(lengths.sum()), dropout / 100
    inside = (torch.arange(longest) < lengths.unsqueeze(1)).to(DEVICE)
    place = inside.flatten().nonzero().squeeze(1)
    upstream = _rows(total, heads * head_dim, 4).view(total, heads, head_dim).to(DEVICE)

    def padded(t: Tensor) -> Tensor:
        out = t.new_zeros(sequences * longest, heads, head_dim).index_copy(0, place, t)
        return out.view(sequences, longest, heads, head_dim).transpose(1, 2)

    def unpadded(t: Tensor) -> Tensor:
        return (t.transpose(1, 2).flatten(0, 1)[place] * upstream.to(t.dtype)).sum()

    def bias(t: Tensor) -> Tensor:
        return torch.zeros_like(inside, dtype=t.dtype).masked_fill(~inside, float("-inf"))[:, None, None]

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = padded(q) @ padded(k).transpose(2, 3) * head_dim**-0.5 + bias(q)
        return unpadded(F.dropout(torch.softmax(scores, -1), p) @ padded(v))

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return unpadded(
            F.scaled_dot_product_attention(padded(q), padded(k), padded(v), attn_mask=bias(q), dropout_p=p)
        )

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = packed_attention(q, k, v, starts, max_seqlen=longest, dropout_p=p, seed=3)
        return (out * upstream.to(q.dtype)).sum()

    contenders: Contenders = {
        OURS: ours,
        "eager torch": eager,
        COMPILED: _compiled(eager),
        "padded scaled_dot_product_attention": sdpa,
    }
    return [_rows(total, heads * head_dim, s).view(total, heads, head_dim) for s in (1, 2, 3)], contenders


def make_dropout_add(tokens: int, width: int) -> tuple[list[Tensor], Contenders]:
    """p = 0.1, as after each sub-layer of a transformer."""
    upstream = _rows(tokens, width, 4).to(DEVICE)

    def eager(hidden: Tensor, residual: Tensor) -> Tensor:
        return ((F.dropout(hidden, 0.1) + residual) * upstream.to(hidden.dtype)).sum()

    def ours(hidden: Tensor, residual: Tensor) -> Tensor:
        return (dropout_add(hidden, residual, dropout_p=0.1, seed=3) * upstream.to(hidden.dtype)).sum()

    contenders: Contenders = {OURS: ours, "eager torch": eager, COMPILED: _compiled(eager)}
    return [_rows(tokens, width, 1), _rows(tokens, width, 2)], contenders


MAKERS: dict[str, Callable[..., tuple[list[Tensor], Contenders]]] = {
    "info_nce": make_info_nce,
    "mask_delta_pool": make_mask_delta_pool,
    "prompt_info_nce": make_prompt_info_nce,
    "packed_attention": make_packed_attention,
    "dropout_add": make_dropout_add,
}
SIZES: dict[str, dict[str, list[tuple[int, ...]]]] = {
    "cpu": {
        "info_nce": [(256, 384), (1024, 384), (4096, 384), (16384, 384)],
        "mask_delta_pool": [(1024, 384)],
        "prompt_info_nce": [(1024, 384)],
        "packed_attention": [(128, 12, 32, 10), (512, 12, 32, 10)],
        "dropout_add": [(4608, 384)],
    },
    "cuda": {
        "info_nce": [(256, 1024), (1024, 1024), (4096, 1024), (16384, 1024), (65536, 1024), (131072, 1024)],
        "mask_delta_pool": [(256, 1024), (1024, 1024)],
        "prompt_info_nce": [(256, 1024), (1024, 1024), (4096, 1024)],
        "packed_attention": [(256, 16, 64, 10), (512, 16, 64, 10), (512, 16, 64, 0)],
        "dropout_add": [(16384, 1024)],
    },
    "quick": {
        "info_nce": [(300, 64)],
        "mask_delta_pool": [(64, 32)],
        "prompt_info_nce": [(64, 32)],
        "packed_attention": [(8, 2, 16, 0)],
        "dropout_add": [(64, 32)],
    },
}
COMPILED = "torch.compile"


def _inputs(case: Case, dtype: torch.dtype | None = None) -> tuple[list[Tensor], Contenders]:
    tensors, contenders = MAKERS[case.op](*case.sizes)
    kind = getattr(torch, case.dtype)
    return [t.to(DEVICE, kind).to(dtype or kind).requires_grad_() for t in tensors], contenders


def _step(function: Callable[..., Tensor], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    loss = function(*tensors)
    gradients = torch.autograd.grad(loss, tensors)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return (loss.detach(), *gradients)


def measure_error(case: Case, skip: list[str]) -> dict[str, float | None]:
    """Largest relative error of a gradient against eager float64, at up to 2,048 rows; none with dropout."""
    if case.op == "dropout_add" or (case.op == "packed_attention" and case.sizes[3]):
        return {}
    small = Case(case.op, case.dtype, (min(case.sizes[0], 2048), *case.sizes[1:]))
    exact = _step(_inputs(small, torch.float64)[1]["eager torch"], _inputs(small, torch.float64)[0])[1:]
    tensors, contenders = _inputs(small)
    errors: dict[str, float | None] = {}
    for name, function in contenders.items():
        if name in (*skip, "cross_entropy(q @ k.T)"):  # the latter is another function: not normalised
            continue
        got = _step(function, tensors)[1:]
        errors[name] = max(float((g.double() - e).norm() / e.norm()) for g, e in zip(got, exact, strict=True))
    return errors


def measure_time(case: Case, skip: list[str], seconds: float) -> dict[str, float | str]:
    """Median milliseconds of forward and backward; the contenders take turns."""
    tensors, contenders = _inputs(case)
    times: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for name in contenders.keys() - set(skip):
        function = contenders[name]
        try:
            for _ in range(2):
                _step(function, tensors)
            times[name] = []
        except (torch.OutOfMemoryError, RuntimeError) as error:
            failed[name] = "out of memory" if "memory" in str(error) else type(error).__name__
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or len(times[OURS]) < 5:
        for name in times:
            start = time.perf_counter()
            _step(contenders[name], tensors)
            times[name].append(1e3 * (time.perf_counter() - start))
    return {**{name: statistics.median(values) for name, values in times.items()}, **failed}


def measure_memory(case: Case, contender: str) -> float:
    """MiB of the op's own peak: forward, backward and gradients, beyond the inputs."""
    tensors, contenders = _inputs(case)
    warm = Case(case.op, case.dtype, (8, *case.sizes[1:]))
    _step(_inputs(warm)[1][contender], _inputs(warm)[0])  # libraries and thread pools
    return peak_mib(lambda: _step(contenders[contender], tensors))


def worker(what: str, case: Case, *more: Any) -> Any:
    """Run one measurement in a process of its own."""
    task = json.dumps({"what": what, "case": asdict(case), "more": more})
    result = run_worker("bench.kernels", task)
    return "out of memory" if result is None else json.loads(result.stdout.splitlines()[-1])


def run_case(case: Case, skip: list[str], seconds: float) -> list[dict[str, Any]]:
    """A row a contender."""
    errors = worker("error", case, skip)
    limit = ERROR_LIMIT[case.dtype]
    if errors.get(OURS) is not None and errors[OURS] > limit:
        raise SystemExit(f"{case.name}: our gradient errs by {errors[OURS]:.1e}, more than {limit:.0e}; not timed")
    times = worker("time", case, skip, seconds)
    rows = []
    for name, median in sorted(times.items(), key=lambda item: item[0] != OURS):
        ours = times[OURS]
        rows.append({
            "op": case.op, "sizes": list(case.sizes), "dtype": case.dtype, "contender": name,
            "median_ms": median,
            "times_ours": median / ours if isinstance(median, float) else None,
            "peak_mib": worker("memory", case, name),
            "error": errors.get(name),
        })  # fmt: skip
    return rows


def to_markdown(environment: dict[str, str], rows: list[dict[str, Any]]) -> str:
    """The table of results."""
    lines = [
        "# Kernels", "", ", ".join(f"{k} {v}" for k, v in environment.items() if k != "command"), "",
        f"`{environment['command'].strip()}`", "",
        "Forward and backward. Time: median, and as a multiple of ours in the same process.",
        "Memory: the op's own peak, with gradients, without inputs.",
        "Error: the worst gradient's relative error against float64 (–: nothing to compare).",
        "Sizes: B × D; mask_delta_pool: sentences × D; packed_attention: sequences × heads × head size × dropout %.",
        "",
        "| op | size | dtype | contender | ms | × ours | peak MiB | error | commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in rows:
        median = f"{r['median_ms']:.3g}" if isinstance(r["median_ms"], float) else r["median_ms"]
        peak = f"{r['peak_mib']:.0f}" if isinstance(r["peak_mib"], float) else r["peak_mib"]
        ratio = "–" if r["times_ours"] is None else f"{r['times_ours']:.2f}"
        error = "–" if r["error"] is None else f"{r['error']:.1e}"
        size = "×".join(map(str, r["sizes"]))
        columns = (r["op"], size, r["dtype"], r["contender"], median, ratio, peak, error, r["commit"])
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--op", choices=list(MAKERS), action="append", help="measure only these, keep the rest (default: all)"
    )
    parser.add_argument("--dtype", choices=list(ERROR_LIMIT), action="append", help="default: float32 and bfloat16")
    parser.add_argument("--max_rows", type=int, help="leave out sizes with more rows")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, without torch.compile: does everything run?"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="at least this long for each timing")
    parser.add_argument("--output_dir", type=Path, default=RESULTS, help="where kernels-DEVICE.json and .md go")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        task = json.loads(options.worker)
        case = Case(task["case"]["op"], task["case"]["dtype"], tuple(task["case"]["sizes"]))
        measure = {"error": measure_error, "time": measure_time, "memory": measure_memory}[task["what"]]
        print(json.dumps(measure(case, *task["more"])))
        return
    sizes = SIZES["quick" if options.quick else DEVICE]
    cases = [
        Case(op, dtype, size)
        for op in options.op or MAKERS
        for dtype in options.dtype or ("float32", "bfloat16")
        for size in sizes[op]
        if options.max_rows is None or size[0] <= options.max_rows
    ]
    rows: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("measuring", total=len(cases))
        for case in cases:
            progress.update(bar, description=case.name)
            rows += run_case(case, [COMPILED] if options.quick else [], options.seconds)
            progress.advance(bar)
    about = environment("bench.kernels", ("torch", "triton", "inf-cl", "memeff"))
    name = f"kernels-{'quick-' if options.quick else ''}{DEVICE}"
    print(record(options.output_dir / name, about, rows, ("op", "dtype", "sizes"), to_markdown))


if __name__ == "__main__":
    main()
