# SPDX-License-Identifier: Apache-2.0
"""What made a checkpoint: versions, hardware, commit, settings, data. Written beside it, compared on resume."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from fastprompt.config import TrainConfig
from fastprompt.errors import FastpromptError

_PACKAGES = ("fastprompt", "torch", "triton", "transformers", "tokenizers", "deepspeed", "numpy")
MUST_MATCH = ("config", "data_hash", "world_size", "zero_stage")


def describe_environment(config: TrainConfig, *, data_hash: str, world_size: int, zero_stage: int) -> dict[str, Any]:
    """A JSON-able record of a run's surroundings."""
    return {
        "versions": {"python": platform.python_version(), **_versions()},
        "hardware": hardware(),
        "commit": _commit(),
        "world_size": world_size,
        "zero_stage": zero_stage,
        "data_hash": data_hash,
        "config": config.trajectory(),
    }


def compare_environments(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Differences that may change numbers a little (versions, hardware, commit), one line each.

    Raises:
        FastpromptError: a difference that changes the run itself: a setting, the data, the ranks, the ZeRO stage.
    """
    for key in MUST_MATCH:
        for name, was, now in _differences(key, saved.get(key), current[key]):
            raise FastpromptError(
                f"cannot resume: {name} was {was!r} and is {now!r} now; resume with the old value, or start a "
                "new run in another --output_dir"
            )
    return [
        f"{name} was {was} and is {now} now"
        for key in ("versions", "hardware", "commit")
        for name, was, now in _differences(key, saved.get(key), current[key])
    ]


def hardware() -> dict[str, Any]:
    """The processor, its cores and memory, and the GPUs."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def _differences(key: str, saved: Any, current: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(saved, dict) and isinstance(current, dict):
        # A record that was read back from JSON has lists where ours has tuples.
        pairs = [(name, saved.get(name), _plain(current.get(name))) for name in {**saved, **current}]
        return [(name, was, now) for name, was, now in pairs if was != now]
    return [(key, saved, current)] if saved != current else []


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _commit() -> str | None:
    """The commit of this source tree, with "+" when it has uncommitted changes; None outside a git checkout."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        run = ["git", "-C", str(root)]
        commit = subprocess.run(
            [*run, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changes = subprocess.run([*run, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changes.stdout.strip() else "")
