# SPDX-License-Identifier: Apache-2.0
"""What a person sees of a run: log lines, and on a terminal a progress bar."""

from __future__ import annotations

import logging
import time
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fastprompt.checkpoint import TrainerState

log = logging.getLogger(__name__)
console = Console(stderr=True)


def configure_logging(rank: int) -> None:
    """Log lines to stderr: everything on rank 0, warnings with the rank's number elsewhere."""
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, show_level=False, markup=False, highlighter=None)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    if rank:
        handler.setFormatter(logging.Formatter(f"[rank {rank}] %(message)s"))
    root = logging.getLogger("fastprompt")
    root.handlers = [handler]
    root.propagate = False
    root.setLevel(logging.WARNING if rank else logging.INFO)


class TrainingProgress:
    """A bar with loss, learning rate, sentences/s and time left; where there is no terminal, log lines instead."""

    def __init__(self, state: TrainerState, batch_size: int, *, enabled: bool) -> None:
        self._state = state
        self._batch_size = batch_size
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  lr {task.fields[lr]}  {task.fields[rate]} sentences/s  left"),
            TimeRemainingColumn(),
            console=console,
            disable=not (enabled and console.is_terminal),
        )
        self._task = self._bar.add_task(
            "train", total=state.max_steps, completed=state.global_step, loss="-", lr="-", rate="-"
        )
        self._first_step = state.global_step
        self._started = time.monotonic()

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._bar.stop()

    def update(self, loss: float, learning_rate: float) -> None:
        """Show the state after a step."""
        self._bar.update(
            self._task,
            completed=self._state.global_step,
            loss=f"{loss:.4f}",
            lr=f"{learning_rate:.2e}",
            rate=f"{self._sentences_per_second():.0f}",
        )

    def log_line(self, entry: dict[str, float]) -> None:
        """The same as a line, where no bar can be shown."""
        if not self._bar.disable:
            return
        state = self._state
        rate = self._sentences_per_second()
        left = (state.max_steps - state.global_step) * self._batch_size / rate
        log.info(
            "step %d/%d  loss %.4f  lr %.2e  %.0f sentences/s  %d:%02d left",
            state.global_step, state.max_steps, entry["loss"], entry["learning_rate"], rate, left // 60, left % 60,
        )  # fmt: skip

    def _sentences_per_second(self) -> float:
        steps = self._state.global_step - self._first_step
        return steps * self._batch_size / max(time.monotonic() - self._started, 1e-9)
