# SPDX-License-Identifier: Apache-2.0
"""Writing so that a reader finds the old file or the whole new one, and never a half: beside, fsync, rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from fastprompt.errors import FastpromptError


@contextmanager
def writing_to(place: Path) -> Iterator[None]:
    """Turns a failed write (full disk, no permission) into a sentence about ``place``."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        # torch.save reports a failed write as a RuntimeError of its archive.
        archive = ("PytorchStreamWriter", "inline_container")
        if isinstance(error, RuntimeError) and not any(word in str(error) for word in archive):
            raise
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise FastpromptError(f"cannot write {place}: {reason}; free some space or choose another folder") from error


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text``, atomically.

    Raises:
        FastpromptError: the disk is full or the folder not writable; ``path`` is then as it was.
    """
    beside = hidden_neighbour(path)
    with writing_to(path):
        try:
            with beside.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
            _fsync_folder(path.parent)
        finally:
            beside.unlink(missing_ok=True)


def hidden_neighbour(target: Path) -> Path:
    """Where ``target`` is put together before it appears."""
    return target.with_name(f".{target.name}.tmp")


def temporary_folder(target: Path) -> Path:
    """An empty folder beside ``target``, to be filled and passed to ``publish_folder``."""
    beside = hidden_neighbour(target)
    with writing_to(target):
        if beside.exists():
            shutil.rmtree(beside)
        beside.mkdir(parents=True)
    return beside


def publish_folder(beside: Path, target: Path) -> None:
    """Rename the filled ``beside`` to ``target`` once everything in it is on the disk."""
    with writing_to(target):
        for folder, _, names in os.walk(beside):
            for name in names:
                with open(os.path.join(folder, name), "rb") as file:
                    os.fsync(file.fileno())
            _fsync_folder(Path(folder))
        if target.exists():
            remove_folder(target)
        beside.rename(target)
        _fsync_folder(target.parent)


def point_link(link: Path, target: Path) -> None:
    """Make the symbolic link ``link`` name its neighbour ``target``, atomically."""
    beside = hidden_neighbour(link)
    with writing_to(link):
        beside.unlink(missing_ok=True)
        beside.symlink_to(target.name)
        beside.replace(link)
        _fsync_folder(link.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder; interrupted half-way it leaves a hidden one that nothing reads, never half a checkpoint."""
    doomed = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
