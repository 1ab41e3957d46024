# SPDX-License-Identifier: Apache-2.0
"""Where the time of a training step goes: named stages, a table of their shares, and a Chrome trace."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function, schedule

from fastprompt.files import hidden_neighbour, write_text, writing_to

log = logging.getLogger(__name__)

STAGES = ("data", "embed", "attention", "ffn", "last layer", "tail", "backward", "optimizer")
TABLE_FILE, TRACE_FILE = "profile.md", "profile-trace.json"
SKIPPED_STEPS = 2
"""Steps before those that are profiled: the first ones allocate, compile and warm caches."""
_PREFIX = "fastprompt::"
_COLLECTIVES = ("gloo:", "nccl:", "record_param_comms")


def stage(name: str) -> Any:
    """Mark what runs inside as a stage of the step, one of ``STAGES``; costs microseconds when nobody profiles."""
    return record_function(_PREFIX + name)


class StepProfiler:
    """Profiles some training steps of this process.

    Call ``step`` after every step. After the last one it writes, into ``folder``, ``profile.md`` (the share of every
    stage) and ``profile-trace.json`` (for chrome://tracing or ui.perfetto.dev), and logs the table.

    Args:
        folder: where the files go.
        steps: how many steps to profile, after ``SKIPPED_STEPS`` others; 0 profiles none.
        device: "cuda" adds the kernels' own times.
    """

    def __init__(self, folder: Path, steps: int, device: str) -> None:
        self._folder = folder
        self._steps = steps
        self._profile: Any = None
        if steps:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
            plan = schedule(wait=SKIPPED_STEPS - 1, warmup=1, active=steps, repeat=1)
            self._profile = profile(activities=activities, schedule=plan, on_trace_ready=self._write)
            self._profile.start()

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop; a run that ends early has profiled fewer steps, or none."""
        if self._profile is not None:
            self._profile.stop()

    def step(self) -> None:
        """One training step is done."""
        if self._profile is not None:
            self._profile.step()

    def _write(self, profiled: Any) -> None:
        table = to_markdown(stage_seconds(profiled.events()))
        write_text(self._folder / TABLE_FILE, table)
        trace = self._folder / TRACE_FILE
        beside = hidden_neighbour(trace)
        with writing_to(trace):
            try:
                profiled.export_chrome_trace(str(beside))
                beside.replace(trace)
            finally:
                beside.unlink(missing_ok=True)
        log.info("%s\nprofile: %s and %s in %s", table, TABLE_FILE, TRACE_FILE, self._folder)


def stage_seconds(events: Iterable[Any]) -> dict[str, float]:
    """Seconds a step of each stage, of "other" and of the whole "step"; and of "communication".

    A stage inside another one counts as the outer: what the backward pass computes again is "backward". On a GPU the
    host runs ahead: there a stage's time is that of the kernels it launched, where the profiler knows it.
    Communication may overlap the stages and is not a part of their sum.
    """
    seconds: dict[str, float] = defaultdict(float)
    steps = 0
    for event in events:
        name = event.name
        if name.startswith("ProfilerStep#"):
            steps += 1
            seconds["step"] += event.time_range.elapsed_us() / 1e6
        elif name.startswith(_PREFIX):
            if not _inside_a_stage(event):
                host, kernels = event.time_range.elapsed_us(), event.device_time_total
                which = name.removeprefix(_PREFIX)
                seconds[which] += (host if which == "data" else kernels or host) / 1e6
        elif name.startswith(_COLLECTIVES):
            seconds["communication"] += event.time_range.elapsed_us() / 1e6
    shares = {name: value / max(steps, 1) for name, value in seconds.items()}
    shares["other"] = max(0.0, shares.get("step", 0.0) - sum(shares.get(name, 0.0) for name in STAGES))
    return shares


def _inside_a_stage(event: Any) -> bool:
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith(_PREFIX):
            return True
        parent = parent.cpu_parent
    return False


def to_markdown(seconds: dict[str, float]) -> str:
    """The table."""
    whole = seconds.get("step", 0.0)
    lines = ["| stage | ms a step | share |", "|---|---:|---:|"]
    rows = [*STAGES, "other"]
    if seconds.get("communication"):
        rows.append("communication")
    for name in rows:
        value = seconds.get(name, 0.0)
        label = f"{name} (overlaps the others)" if name == "communication" else name
        lines.append(f"| {label} | {1e3 * value:.1f} | {100 * value / whole if whole else 0.0:.1f}% |")
    lines.append(f"| step | {1e3 * whole:.1f} | 100% |")
    return "\n".join(lines) + "\n"
