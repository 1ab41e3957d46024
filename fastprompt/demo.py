# SPDX-License-Identifier: Apache-2.0
"""The demo: the main job, end to end, on a real model and on sentences that every machine has."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from fastprompt import checkpoint
from fastprompt.config import build_train_config
from fastprompt.data.documentation import documentation_paragraphs, split_held_out
from fastprompt.distributed import free_port
from fastprompt.errors import FastpromptError
from fastprompt.evaluation import unit_rows
from fastprompt.evaluation.neighbours import evaluate_neighbours, nearest
from fastprompt.evaluation.sts import Pairs, load_task, sts_score
from fastprompt.files import write_text, writing_to
from fastprompt.model import PromptEncoder
from fastprompt.model.encoder import default_device

log = logging.getLogger(__name__)

_MARKER = "demo.txt"
_MIN_SENTENCES = 5_000
_GALLERY = 2_000
_QUERIES = 4
_MEANINGS = {
    "mrr": ("neighbour MRR", "higher"),
    "recall_at_10": ("neighbour recall@10", "higher"),
    "alignment": ("alignment", "lower"),
    "uniformity": ("uniformity", "lower"),
    "anisotropy": ("anisotropy", "lower"),
    "stsb_test": ("STS-B test × 100", "higher"),
}


def run_demo(
    *,
    output_dir: str,
    deepspeed_config: str | None,
    num_accelerators: int | None,
    max_steps: int | None,
    sts_dir: str | None,
) -> int:
    """Prepare the data, train through the deepspeed launcher, and print scores before and after; the exit status.

    Raises:
        FastpromptError: the folder holds something else, the STS data or the model is missing, too little text.
    """
    folder = Path(output_dir)
    pairs = load_task(sts_dir, "STSBenchmark") if sts_dir else None
    recipe = build_train_config("demo", {})
    before_model = PromptEncoder.from_pretrained(recipe.model, recipe.encoder)  # before anything is replaced
    train, held_out = split_held_out(documentation_paragraphs())
    if len(train) < _MIN_SENTENCES:
        raise FastpromptError(
            f"the documentation of this Python gives only {len(train)} sentences, the demo needs {_MIN_SENTENCES}; "
            "install the standard library's sources and pydoc topics (on Debian: libpython3-stdlib)"
        )
    _claim(folder)
    train_file, eval_file, run = folder / "train.txt", folder / "held_out.tsv", folder / "run"
    write_text(train_file, "".join(f"{sentence}\n" for sentence in train))
    write_text(eval_file, "".join(f"{first}\t{second}\n" for first, second in held_out))
    log.info(
        "%s sentences of Python's documentation to train on, %d held-out pairs of neighbours",
        f"{len(train):,}", len(held_out),
    )  # fmt: skip
    before = _scores(before_model, held_out, pairs)
    del before_model
    gc.collect()
    status = _launch(run, train_file, eval_file, deepspeed_config, num_accelerators, max_steps)
    if status:
        log.error("training ended with status %d; its messages are above", status)
        return status
    best = run / checkpoint.BEST
    after_model = PromptEncoder.from_pretrained(best)
    after = _scores(after_model, held_out, pairs)
    output = Console()
    output.print(_score_table(before, after))
    _print_neighbours(output, after_model, [first for first, _ in held_out][:_QUERIES], train[:_GALLERY])
    output.print(f"The checkpoint is in {best}. Score it with: fastprompt eval {best} --sts_dir DIR", soft_wrap=True)
    return 0


def _claim(folder: Path) -> None:
    """Make ``folder`` an empty demo folder; only an earlier demo may be replaced."""
    with writing_to(folder):
        if folder.exists() and any(folder.iterdir()):
            if not (folder / _MARKER).exists():
                raise FastpromptError(f"{folder} holds something that is not a demo; give another --output_dir")
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / _MARKER, "Made by fastprompt demo, which replaces this folder when it runs again.\n")


def _launch(
    run: Path,
    train_file: Path,
    eval_file: Path,
    deepspeed_config: str | None,
    num_accelerators: int | None,
    max_steps: int | None,
) -> int:
    batch = build_train_config("demo", {}).global_batch_size
    most = torch.cuda.device_count() or min(2, len(os.sched_getaffinity(0)))
    ranks = num_accelerators or max(n for n in range(1, most + 1) if batch % n == 0)
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", str(ranks)]
    command += ["--master_port", str(free_port())]
    command += ["--no_local_rank", "--module", "fastprompt", "train", "--recipe", "demo"]
    command += ["--train_file", str(train_file), "--eval_file", str(eval_file), "--output_dir", str(run)]
    if deepspeed_config:
        command += ["--deepspeed_config", deepspeed_config]
    if max_steps:
        command += ["--max_steps", str(max_steps)]
    log.info("$ deepspeed %s", " ".join(command[3:]))
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment.setdefault("DS_ACCELERATOR", "cpu")
    return subprocess.run(command, env=environment, check=False).returncode


def _scores(encoder: PromptEncoder, held_out: list[tuple[str, str]], sts: Pairs | None) -> dict[str, float]:
    encoder.to(default_device())
    scores = evaluate_neighbours(encoder.encode, held_out)
    if sts is not None:
        scores["stsb_test"] = 100 * sts_score(encoder.encode, sts)
    return scores


def _score_table(before: dict[str, float], after: dict[str, float]) -> Table:
    table = Table("score", "better", "untrained", "trained", title="Held-out documentation, before and after")
    for name, value in before.items():
        label, better = _MEANINGS[name]
        table.add_row(label, better, f"{value:.3f}", f"{after[name]:.3f}")
    return table


def _print_neighbours(output: Console, encoder: PromptEncoder, queries: list[str], gallery: list[str]) -> None:
    order, cosines = nearest(unit_rows(encoder.encode(gallery)), unit_rows(encoder.encode(queries)), 2)
    output.print("Nearest neighbours of held-out sentences among training sentences:")
    for query, found, values in zip(queries, order, cosines, strict=True):
        output.print(f"  {query}", markup=False, highlight=False, soft_wrap=True)
        for index, cosine in zip(found, values, strict=True):
            output.print(f"    {cosine:.2f}  {gallery[index]}", markup=False, highlight=False, soft_wrap=True)
