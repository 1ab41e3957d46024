# SPDX-License-Identifier: Apache-2.0
"""Atomic writing, with a file system that really refuses: a size limit on the process's files."""

import subprocess
import sys

import pytest
from support import ROOT

from fastprompt.errors import FastpromptError
from fastprompt.files import point_link, publish_folder, temporary_folder, write_text

FULL_DISK = """
import resource, sys
from pathlib import Path
import torch
from fastprompt.errors import FastpromptError
from fastprompt.files import write_text, writing_to
from safetensors.torch import save_file
target = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # a write beyond 4 KiB fails as on a full disk
for write in (
    lambda: write_text(target, "x" * 100_000),
    lambda: save_file({"w": torch.zeros(100_000)}, target.with_name("w.safetensors")),
    lambda: torch.save(torch.zeros(100_000), target.with_name("w.pt")),
):
    try:
        with writing_to(target):
            write()
    except FastpromptError as error:
        print(error)
"""


def test_a_full_disk_is_named_and_leaves_the_old_file(tmp_path):
    target = tmp_path / "state.json"
    write_text(target, "old and whole")
    result = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(target)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    lines = result.stdout.splitlines()
    assert len(lines) == 3, result.stdout
    for line in lines:
        assert line.startswith(f"cannot write {target}: ")
        assert line.endswith("; free some space or choose another folder")
    assert target.read_text() == "old and whole"
    assert not list(tmp_path.glob(".*.tmp"))


def test_publish_and_link(tmp_path):
    for n in (1, 2):
        target = tmp_path / f"checkpoint-{n}"
        beside = temporary_folder(target)
        (beside / "inner").mkdir()
        (beside / "inner" / "f").write_text(str(n))
        assert not target.exists()
        publish_folder(beside, target)
        point_link(tmp_path / "last", target)
        assert (tmp_path / "last" / "inner" / "f").read_text() == str(n)
        assert not beside.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2", "last"]


def test_no_permission(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FastpromptError, match="cannot write .*choose another folder"):
        temporary_folder(tmp_path / "file" / "inside")
