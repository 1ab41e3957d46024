# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a run's folder.

    checkpoint-<step>/   the model, and training_state/ with all that a resume needs
    best-<step>/         the model alone, at its best evaluation
    last, best           links to the newest of each
    trainer_state.json   log history, in transformers' format

A checkpoint is filled beside its place, synced and renamed; then the link moves, then the old one goes. Whatever
moment a run is killed at, ``last`` and ``best`` name whole checkpoints.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastprompt.config import TrainConfig, dump_yaml
from fastprompt.distributed import barrier, rank
from fastprompt.engine import full_state
from fastprompt.errors import FastpromptError
from fastprompt.files import (
    hidden_neighbour,
    point_link,
    publish_folder,
    remove_folder,
    temporary_folder,
    write_text,
    writing_to,
)

LAST, BEST = "last", "best"
STATE_FILE = "trainer_state.json"
ENVIRONMENT_FILE = "environment.json"
CONFIG_FILE = "config.yaml"
_TRAINING_STATE = "training_state"
_ENGINE_TAG = "engine"
_OURS = re.compile(r"\.?(checkpoint|best)-\d+(\.\d+)?(\.tmp|\.old)?")
"""Names of our folders, finished or not; a user's copy (best-backup) is not among them."""


@dataclass
class TrainerState:
    """Where a run stands: ``trainer_state.json``. Its ``log_history`` is in the format of transformers' trainer.

    ``metric`` names what ``best_metric`` is, ``loss_window`` holds the losses since the last log entry, and
    ``train_runtime`` the seconds of training so far.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    metric: str | None = None
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    log_history: list[dict[str, Any]] = field(default_factory=list)
    loss_window: list[float] = field(default_factory=list)
    loss_sum: float = 0.0
    train_runtime: float = 0.0
    samples_seen: int = 0

    @property
    def finished(self) -> bool:
        """All steps are done."""
        return self.global_step >= self.max_steps > 0

    def to_json(self) -> str:
        """The file's text; numbers survive the round trip to the bit."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def load(cls, path: Path) -> TrainerState:
        """Read ``trainer_state.json``.

        Raises:
            FastpromptError: the file is missing or damaged.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{f.name: values[f.name] for f in fields(cls)})
        except (OSError, json.JSONDecodeError, KeyError) as error:
            raise FastpromptError(f"{path} is missing or damaged ({error}); resume from another checkpoint") from None


def save_best(engine: Any, folder: Path, state: TrainerState, config: TrainConfig, environment: dict) -> None:
    """Write ``best-<step>`` and move ``best`` to it. A collective operation."""
    target, beside = _begin(folder / f"{BEST}-{state.global_step}")
    _write_model(engine, beside, state, config, environment)
    _finish(beside, target, folder / BEST)


def save_last(engine: Any, folder: Path, state: TrainerState, config: TrainConfig, environment: dict) -> None:
    """Write ``checkpoint-<step>``, with all that a resume needs, and move ``last`` to it. A collective operation."""
    target, beside = _begin(folder / f"checkpoint-{state.global_step}")
    _write_model(engine, beside, state, config, environment)
    inside = beside / _TRAINING_STATE
    with writing_to(target):
        engine.save_checkpoint(str(inside), tag=_ENGINE_TAG)
        torch.save(_random_state(), inside / f"rng_rank{rank()}.pt")
    _finish(beside, target, folder / LAST)


def check_free(folder: Path) -> None:
    """A new run may start in ``folder``: there is nothing in it but what a run leaves that never saved.

    Raises:
        FastpromptError: there is something.
    """
    if folder.exists() and not folder.is_dir():
        raise FastpromptError(f"{folder} is a file; give another --output_dir")
    found = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    if any(name != CONFIG_FILE and not name.startswith(".") for name in found):
        cure = "continue the run in it with --resume, or give" if LAST in found else "give"
        raise FastpromptError(f"{folder} is not empty; {cure} another --output_dir")


def find_last(folder: Path) -> Path:
    """The checkpoint that ``last`` names.

    Raises:
        FastpromptError: there is none.
    """
    link = folder / LAST
    if not (link / _TRAINING_STATE).is_dir():
        raise FastpromptError(
            f"nothing to resume in {folder}: it has no checkpoint named {LAST!r}, written every save_steps; "
            "give the --output_dir of an interrupted run, or start a new one without --resume"
        )
    return link.resolve()


def load_environment(checkpoint: Path) -> dict[str, Any]:
    """The record of a checkpoint's surroundings."""
    try:
        saved: dict[str, Any] = json.loads((checkpoint / ENVIRONMENT_FILE).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise FastpromptError(
            f"{checkpoint / ENVIRONMENT_FILE} is missing or damaged ({error}); resume from another checkpoint"
        ) from None
    return saved


def restore(engine: Any, checkpoint: Path) -> None:
    """Load weights, optimizer, schedule and this rank's random state. A collective operation."""
    inside = checkpoint / _TRAINING_STATE
    try:
        path, _ = engine.load_checkpoint(str(inside), tag=_ENGINE_TAG)
        random_state = torch.load(inside / f"rng_rank{rank()}.pt", weights_only=False)
    except Exception as error:  # damage shows as anything from OSError to AssertionError and UnpicklingError
        raise FastpromptError(f"{inside} is incomplete or damaged ({error}); start a new run") from error
    if path is None:
        raise FastpromptError(f"{inside} holds no DeepSpeed state; start a new run")
    _set_random_state(random_state)


def clear_leftovers(folder: Path) -> None:
    """Remove what a killed run left half-written: hidden folders, and checkpoints that no link names."""
    named = {(folder / link).resolve() for link in (LAST, BEST)}
    for path in list(folder.iterdir()):
        if path.is_dir() and not path.is_symlink() and path.resolve() not in named and _OURS.fullmatch(path.name):
            remove_folder(path)


def _begin(target: Path) -> tuple[Path, Path]:
    """A free place like ``target``, and an empty folder beside it to fill."""
    barrier()  # no rank may still be looking for a free name when rank 0 makes one
    if target.exists():  # a resumed run comes by again: the old one stays until the link has moved
        target = next(
            free for n in itertools.count(1) if not (free := target.with_name(f"{target.name}.{n}")).exists()
        )
    barrier()
    if rank() == 0:
        temporary_folder(target)
    barrier()
    return target, hidden_neighbour(target)


def _write_model(
    engine: Any, beside: Path, state: TrainerState, config: TrainConfig, environment: dict[str, Any]
) -> None:
    weights = full_state(engine)
    if rank() != 0:
        return
    prefix = "encoder."
    encoder_weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    with writing_to(beside):
        engine.module.encoder.save_pretrained(beside, encoder_weights)
    write_text(beside / STATE_FILE, state.to_json())
    write_text(beside / CONFIG_FILE, dump_yaml(config))
    write_text(beside / ENVIRONMENT_FILE, json.dumps(environment, indent=2, ensure_ascii=False) + "\n")


def _finish(beside: Path, target: Path, link: Path) -> None:
    barrier()  # every rank has written its part
    if rank() == 0:
        old = link.resolve() if link.is_symlink() else None
        publish_folder(beside, target)
        point_link(link, target)
        if old is not None and old != target.resolve() and old.is_dir():
            remove_folder(old)
    barrier()


def _random_state() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
