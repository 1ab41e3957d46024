# SPDX-License-Identifier: Apache-2.0
"""What the benches share: where results go, what machine made them, peak memory."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def peak_mib(function: Callable[[], object]) -> float:
    """MiB by which memory grows at most while ``function`` runs: torch's own on a GPU, else resident memory."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    resident = _status_kib("VmRSS")
    function()
    return (_status_kib("VmHWM") - resident) / 1024


def _status_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


def environment(module: str, packages: tuple[str, ...]) -> dict[str, str]:
    """Hardware, versions, commit and command, for every file of results."""

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    return {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else _cpu(),
        "python": platform.python_version(),
        **{name: installed(name) for name in packages},
        "commit": commit.strip() or "unknown",
        "command": " ".join(["python -m", module, *sys.argv[1:]]),
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if "model name" in line:
            return f"{line.split(':')[1].strip()}, {torch.get_num_threads()} threads"
    return f"{platform.processor()}, {torch.get_num_threads()} threads"


def run_worker(module: str, task: str) -> subprocess.CompletedProcess[str] | None:
    """Run ``python -m module --worker task`` in a process of its own; None when its memory did not suffice."""
    command = [sys.executable, "-m", module, "--worker", task]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode != 0:
        if "out of memory" in result.stderr.lower() or "alloc" in result.stderr or result.returncode == -9:
            return None
        raise SystemExit(f"{module}: {task} failed\n{result.stderr[-3000:]}")
    return result


def record(
    place: Path,
    about: dict[str, str],
    rows: list[dict[str, Any]],
    identity: tuple[str, ...],
    to_markdown: Callable[[dict[str, str], list[dict[str, Any]]], str],
) -> str:
    """Write ``place``.json and ``place``.md; the table's text.

    Rows of an earlier run there stay if the machine and the versions are the same and no new row has their
    ``identity`` fields. Every row names the commit it was measured at.
    """
    rows = [{**row, "commit": about["commit"]} for row in rows]
    path = place.with_suffix(".json")
    if path.exists():
        earlier = json.loads(path.read_text())
        if all(earlier["environment"].get(k) == about[k] for k in about if k not in ("commit", "command")):
            again = {str([row[name] for name in identity]) for row in rows}
            rows = [row for row in earlier["rows"] if str([row[name] for name in identity]) not in again] + rows
    place.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": about, "rows": rows}, indent=1) + "\n")
    text = to_markdown(about, rows)
    place.with_suffix(".md").write_text(text)
    return text
