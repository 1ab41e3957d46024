# SPDX-License-Identifier: Apache-2.0
"""A file's sentences as token ids, in a memory-mapped folder that all ranks share.

Layout of a cache folder: ``tokens.bin`` (all ids, end to end), ``offsets.bin`` (int64, rows × columns + 1),
``meta.json``. The folder's name is a hash of the file's bytes, the tokenizer, the template's spacing and the length
limit, so a cache is never stale; it appears by one rename, so it is never half-written.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fastprompt.data.reading import RowReader
from fastprompt.errors import FastpromptError
from fastprompt.files import publish_folder, temporary_folder, writing_to
from fastprompt.prompts import PromptTokenizer, TokenIds

log = logging.getLogger(__name__)

_LAYOUT = 1
_CHUNK_ROWS = 4096


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/fastprompt`` or ``~/.cache/fastprompt``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastprompt"


class TokenCache:
    """A file's rows as token ids: ``cache[row, column]`` is an array of ids, without special tokens.

    Attributes:
        rows, columns: the shape.
        data_hash: SHA-256 of the file's bytes.
    """

    def __init__(self, folder: Path) -> None:
        meta = json.loads((folder / "meta.json").read_text())
        self.rows: int = meta["rows"]
        self.columns: int = meta["columns"]
        self.data_hash: str = meta["data_hash"]
        self.summary: str = meta["summary"]
        self._tokens: TokenIds = _map(folder / "tokens.bin", np.dtype(meta["dtype"]))
        self._offsets: npt.NDArray[np.int64] = _map(folder / "offsets.bin", np.dtype(np.int64))

    def __getitem__(self, place: tuple[int, int]) -> TokenIds:
        row, column = place
        index = row * self.columns + column
        start, end = self._offsets[index : index + 2]
        ids: TokenIds = self._tokens[start:end]
        return ids

    def lengths(self, rows: npt.NDArray[np.int64], column: int) -> npt.NDArray[np.int64]:
        """Numbers of tokens of some rows' sentences."""
        index = rows * self.columns + column
        counts: npt.NDArray[np.int64] = self._offsets[index + 1] - self._offsets[index]
        return counts


def open_token_cache(
    path: str | Path, tokenizer: PromptTokenizer, max_tokens: int, cache_dir: Path | None = None
) -> TokenCache:
    """The token cache of ``path``; tokenises the file if nobody has yet.

    Safe to call from any number of processes at once: one builds, the others wait for it on a file lock.

    Args:
        path: a file that ``RowReader`` understands.
        tokenizer: its tokens, and the spacing of its templates, are part of the cache's identity.
        max_tokens: sentences are cut to this many tokens.
        cache_dir: where caches live; ``default_cache_dir()`` when None.

    Raises:
        FastpromptError: what ``RowReader`` raises, or a cache folder that cannot be written.
    """
    reader = RowReader(path)
    data_hash = hash_file(Path(path))
    identity = f"{_LAYOUT}|{data_hash}|{reader.path.suffixes}|{tokenizer.fingerprint}|{max_tokens}"
    folder = (cache_dir or default_cache_dir()) / hashlib.sha256(identity.encode()).hexdigest()[:32]
    if not (folder / "meta.json").exists():
        with writing_to(folder.parent):
            folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")):
            if not (folder / "meta.json").exists():
                _build(reader, tokenizer, max_tokens, folder, data_hash)
    return TokenCache(folder)


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _build(reader: RowReader, tokenizer: PromptTokenizer, max_tokens: int, folder: Path, data_hash: str) -> None:
    start = time.monotonic()
    dtype = np.dtype(np.uint16 if len(tokenizer.hf_tokenizer) <= 1 << 16 else np.uint32)
    beside = temporary_folder(folder)
    total, cut, rows, shown = 0, 0, 0, start
    # Only the writing itself may be reported as such: the reader's own errors pass through.
    with (beside / "tokens.bin").open("wb") as tokens, (beside / "offsets.bin").open("wb") as ends:
        ends.write(np.zeros(1, np.int64).tobytes())
        remaining = iter(reader)
        while chunk := list(islice(remaining, _CHUNK_ROWS)):
            ids, chunk_cut = tokenizer.encode(list(chain.from_iterable(chunk)), max_tokens)
            offsets = total + np.cumsum([len(row) for row in ids], dtype=np.int64)
            with writing_to(folder):
                for file, values in ((tokens, np.concatenate(ids).astype(dtype)), (ends, offsets)):
                    file.write(values.tobytes())
                    file.flush()
            total, cut, rows = int(offsets[-1]), cut + chunk_cut, rows + len(chunk)
            if time.monotonic() - shown > 5:
                shown = time.monotonic()
                log.info("tokenising %s: %s rows, %.0f rows/s", reader.path, f"{rows:,}", rows / (shown - start))
    summary = (
        f"{reader.path.name}: {reader.report}; {reader.columns} column{'s' if reader.columns > 1 else ''}, "
        f"{total:,} tokens, {cut:,} sentences cut to {max_tokens} tokens"
    )
    meta = {
        "rows": rows,
        "columns": reader.columns,
        "dtype": dtype.name,
        "data_hash": data_hash,
        "summary": summary,
    }
    with writing_to(folder):
        (beside / "meta.json").write_text(json.dumps(meta, indent=2))
    publish_folder(beside, folder)
    log.info("tokenised %s in %.1f s", reader.path, time.monotonic() - start)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with writing_to(path):
        file = path.open("a")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    if path.stat().st_size == 0:
        return np.empty(0, dtype)
    if path.stat().st_size % dtype.itemsize:
        raise FastpromptError(f"{path} is damaged; delete the folder {path.parent} to have it built again")
    return np.memmap(path, dtype=dtype, mode="r")
