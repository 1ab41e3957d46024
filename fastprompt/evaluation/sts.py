# SPDX-License-Identifier: Apache-2.0
"""Semantic textual similarity with SentEval's protocol and files.

A task's score is Spearman's correlation of the cosine of two embeddings with the human score, over the pairs of all
subsets of the task together ("all" in SentEval). Pairs without a human score are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.stats import spearmanr

from fastprompt.errors import FastpromptError
from fastprompt.evaluation import Encode, unit_rows

YEARLY = ("STS12", "STS13", "STS14", "STS15", "STS16")
TASKS = (*YEARLY, "STSBenchmark", "SICKRelatedness")
"""The seven columns of the usual table, in its order."""
_SPLIT_FILES = {
    "STSBenchmark": ("STS/STSBenchmark", {"train": "sts-train.csv", "dev": "sts-dev.csv", "test": "sts-test.csv"}),
    "SICKRelatedness": (
        "SICK",
        {"train": "SICK_train.txt", "dev": "SICK_trial.txt", "test": "SICK_test_annotated.txt"},
    ),
}


class Pairs(NamedTuple):
    """A task's sentence pairs and their human scores, three lists of one length."""

    first: list[str]
    second: list[str]
    scores: list[float]


def load_task(sts_dir: str | Path, task: str, split: str = "test") -> Pairs:
    """Read a task from a folder in SentEval's layout (``STS/STS12-en-test``, …, ``STS/STSBenchmark``, ``SICK``).

    Args:
        sts_dir: SentEval's ``data/downstream`` folder, or its ``STS`` folder.
        task: one of ``TASKS``.
        split: "train", "dev" or "test"; the yearly tasks have only "test".

    Raises:
        FastpromptError: an unknown task or split, a missing or malformed file.
    """
    if task not in TASKS:
        raise FastpromptError(f"no STS task {task!r}; known are {', '.join(TASKS)}")
    root = Path(sts_dir)
    if not (root / "STS").is_dir() and root.name == "STS":
        root = root.parent
    if task in YEARLY:
        if split != "test":
            raise FastpromptError(f"{task} has only a test split, not {split!r}; use STSBenchmark or SICKRelatedness")
        return _load_year(root / "STS" / f"{task}-en-test", task)
    folder, files = _SPLIT_FILES[task]
    if split not in files:
        raise FastpromptError(f"{task} has the splits {', '.join(files)}, not {split!r}")
    path = root / folder / files[split]
    columns = (5, 6, 4) if task == "STSBenchmark" else (1, 2, 3)
    pairs = Pairs([], [], [])
    for number, line in enumerate(_lines(path, task), 1):
        cells = line.split("\t")
        if len(cells) <= max(columns):
            if not line.strip():
                continue
            raise FastpromptError(
                f"{path}, line {number}: {len(cells)} tab-separated columns are too few; fetch it again"
            )
        try:
            score = float(cells[columns[2]])
        except ValueError:
            if number == 1:  # a header line
                continue
            raise FastpromptError(
                f"{path}, line {number}: {cells[columns[2]]!r} is not a score; fetch it again"
            ) from None
        pairs.first.append(cells[columns[0]].strip())
        pairs.second.append(cells[columns[1]].strip())
        pairs.scores.append(score)
    return _not_empty(pairs, path)


def sts_score(encode: Encode, pairs: Pairs) -> float:
    """Spearman's correlation of cosine and human score, in [−1, 1]; every distinct sentence is encoded once."""
    sentences = list(dict.fromkeys([*pairs.first, *pairs.second]))
    row = {sentence: index for index, sentence in enumerate(sentences)}
    unit = unit_rows(encode(sentences))
    first = unit[[row[sentence] for sentence in pairs.first]]
    second = unit[[row[sentence] for sentence in pairs.second]]
    return float(spearmanr((first * second).sum(axis=1), pairs.scores).statistic)


def load_tasks(sts_dir: str | Path, tasks: Sequence[str] = TASKS, split: str = "test") -> dict[str, Pairs]:
    """``load_task`` for several tasks."""
    return {task: load_task(sts_dir, task, split) for task in tasks}


def evaluate_sts(encode: Encode, tasks: Mapping[str, Pairs]) -> dict[str, float]:
    """Score of each task, in [−1, 1]."""
    return {task: sts_score(encode, pairs) for task, pairs in tasks.items()}


def format_table(scores: dict[str, float]) -> str:
    """Percent with two decimals, one column a task, and their average."""
    columns = [*scores, "Avg."]
    values = [*scores.values(), float(np.mean(list(scores.values())))]
    cells = [(name, f"{100 * value:.2f}") for name, value in zip(columns, values, strict=True)]
    widths = [max(len(name), len(value)) for name, value in cells]
    rows = (
        [name.center(width) for (name, _), width in zip(cells, widths, strict=True)],
        ["-" * width for width in widths],
        [value.center(width) for (_, value), width in zip(cells, widths, strict=True)],
    )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _load_year(folder: Path, task: str) -> Pairs:
    pairs = Pairs([], [], [])
    # A subset counts when both of its files are there: STS13's SMT has its scores published without its sentences.
    inputs = sorted(folder.glob("STS.input.*.txt"))
    if not inputs:
        raise FastpromptError(_missing(folder, task))
    for input_path in inputs:
        gold_path = input_path.with_name(re.sub(r"^STS\.input\.", "STS.gs.", input_path.name))
        texts, golds = _lines(input_path, task), _lines(gold_path, task)
        if len(texts) != len(golds):
            raise FastpromptError(
                f"{input_path} has {len(texts)} lines and {gold_path.name} {len(golds)}; fetch both again"
            )
        for number, (text, gold) in enumerate(zip(texts, golds, strict=True), 1):
            if not gold.strip():
                continue
            cells = text.split("\t")
            if len(cells) < 2:
                raise FastpromptError(f"{input_path}, line {number}: no tab between two sentences; fetch it again")
            try:
                score = float(gold)
            except ValueError:
                raise FastpromptError(
                    f"{gold_path}, line {number}: {gold!r} is not a score; fetch it again"
                ) from None
            pairs.first.append(cells[0].strip())
            pairs.second.append(cells[1].strip())
            pairs.scores.append(score)
    return _not_empty(pairs, folder)


def _lines(path: Path, task: str) -> list[str]:
    if not path.is_file():
        raise FastpromptError(_missing(path, task))
    # Split at newlines only: the files hold other characters that str.splitlines takes for line ends.
    lines = path.read_bytes().decode("utf-8-sig", errors="replace").split("\n")
    if lines and not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def _missing(path: Path, task: str) -> str:
    return (
        f"{task}: {path} is missing; give the folder that SentEval's download script fills "
        "(data/downstream, with STS/ and SICK/ in it) or leave the task out"
    )


def _not_empty(pairs: Pairs, path: Path) -> Pairs:
    if not pairs.scores:
        raise FastpromptError(f"{path} holds no scored pair; fetch it again")
    return pairs
