# SPDX-License-Identifier: Apache-2.0
"""Rows of one, two or three sentences from .txt, .csv, .tsv, .jsonl and .parquet files, plain or gzipped.

One column is unsupervised text, two are a pair, three a pair and its hard negative. Files are read as a stream. A
row that cannot be used is counted and skipped, never guessed at.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from fastprompt.errors import FastpromptError

FORMATS = (".txt", ".csv", ".tsv", ".jsonl", ".parquet")
COLUMN_NAMES = (
    ("sent0", "sentence", "sentence0", "sentence1", "text", "anchor", "query", "premise"),
    ("sent1", "sentence2", "positive", "pos", "hypothesis"),
    ("hard_neg", "hard_negative", "negative", "neg"),
)
"""Names that mark a header line (.csv, .tsv) and choose the columns (.jsonl, .parquet), by role."""
_ROLE = {name: role for role, names in enumerate(COLUMN_NAMES) for name in names}
_ROLE_NAMES = ("sentence", "positive", "hard negative")
_SHOWN_LINES = 5


class ReadReport:
    """What was read: usable rows, and for each kind of bad row how many and where they begin."""

    def __init__(self) -> None:
        self.rows = 0
        self.bad: Counter[str] = Counter()
        self.first_lines: dict[str, list[int]] = {}

    def reject(self, reason: str, line: int) -> None:
        """Count a bad row."""
        self.bad[reason] += 1
        lines = self.first_lines.setdefault(reason, [])
        if len(lines) < _SHOWN_LINES:
            lines.append(line)

    def __str__(self) -> str:
        text = f"{self.rows:,} usable rows"
        for reason, count in self.bad.items():
            shown = ", ".join(map(str, self.first_lines[reason]))
            more = ", …" if count > _SHOWN_LINES else ""
            text += f"; {count:,} skipped: {reason} (line{'s' if count > 1 else ''} {shown}{more})"
        return text


class RowReader:
    """Iterates over a file's usable rows, each a tuple of ``columns`` sentences; fills ``report`` on the way.

    Raises:
        FastpromptError: no such file, an unknown extension, no usable row, columns that cannot be told apart, a
            damaged gzip or parquet file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.report = ReadReport()
        suffixes = [suffix.lower() for suffix in self.path.suffixes]
        self._gzip = suffixes[-1:] == [".gz"]
        if self._gzip:
            suffixes.pop()
        self._format = suffixes[-1] if suffixes else ""
        if self._format not in FORMATS:
            raise FastpromptError(
                f"{self.path}: unknown kind of file; the name must end in one of {', '.join(FORMATS)}, "
                "with .gz behind it when gzipped"
            )
        if not self.path.is_file():
            raise FastpromptError(f"{self.path}: no such file; give the path of a text file with one sentence a line")
        self.columns = self._count_columns()

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        self.report = ReadReport()
        try:
            for line, cells in self._raw_rows():
                row = self._check_row(line, cells, self.columns)
                if row is not None:
                    self.report.rows += 1
                    yield row
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise FastpromptError(f"{self.path}: damaged gzip file ({error}); fetch or compress it again") from None
        if not self.report.rows:
            raise self._nothing_usable()

    def _count_columns(self) -> int:
        """Of the first row that has text; every other row must have as many. Also finds that some row is usable."""
        columns = 0
        try:
            for line, cells in self._raw_rows():
                if not columns and any(cell.strip() for cell in cells):
                    columns = len(cells)
                    if columns > 3:
                        raise FastpromptError(
                            f"{self.path}: {columns} columns; one (sentences), two (pairs) or three (pairs and a "
                            "hard negative) are understood; a sentence that holds commas must be quoted in .csv"
                        )
                if self._check_row(line, cells, columns or len(cells)) is not None:
                    return columns
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise FastpromptError(f"{self.path}: damaged gzip file ({error}); fetch or compress it again") from None
        raise self._nothing_usable()

    def _nothing_usable(self) -> FastpromptError:
        return FastpromptError(f"{self.path}: no usable row ({self.report}); nothing to train on")

    def _check_row(self, line: int, cells: list[str], columns: int) -> tuple[str, ...] | None:
        if len(cells) != columns:
            reason = "empty" if not any(cells) else f"not {columns} column{'s' if columns > 1 else ''}"
            self.report.reject(reason, line)
            return None
        # Bytes that are not UTF-8 were read as lone surrogates; JSON can spell such halves out.
        if any("\ud800" <= char <= "\udfff" for cell in cells if not cell.isascii() for char in cell):
            self.report.reject("not UTF-8", line)
            return None
        row = tuple(cell.strip() for cell in cells)
        if not all(row):
            self.report.reject("empty", line)
            return None
        return row

    def _raw_rows(self) -> Iterator[tuple[int, list[str]]]:
        """(line or row number, cells) of every row."""
        if self._format == ".parquet":
            yield from self._parquet_rows()
            return
        with self._open() as binary:
            text = io.TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape", newline="")
            if self._format == ".txt":
                for number, line in enumerate(text, 1):
                    yield number, [line]
            elif self._format == ".jsonl":
                yield from self._jsonl_rows(text)
            else:
                yield from self._csv_rows(text)

    def _open(self) -> BinaryIO:
        return cast(BinaryIO, gzip.open(self.path, "rb")) if self._gzip else self.path.open("rb")

    def _csv_rows(self, text: io.TextIOWrapper) -> Iterator[tuple[int, list[str]]]:
        # Tab-separated files have no quoting: a sentence may begin with a quotation mark.
        if self._format == ".tsv":
            reader = csv.reader(text, delimiter="\t", quoting=csv.QUOTE_NONE)
        else:
            reader = csv.reader(text)
        first = True
        header: list[str] = []
        chosen: list[int] = []
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error:
                self.report.reject("not CSV", line)
                continue
            if first and any(cells):
                first = False
                names = [cell.strip().lower() for cell in cells]
                if any(name in _ROLE for name in names):
                    header = names
                    chosen = [names.index(name) for name in self._choose_columns(names)]
                    continue
            if header and len(cells) == len(header):
                cells = [cells[index] for index in chosen]
            elif header and any(cells):
                self.report.reject(f"not {len(header)} columns", line)
                continue
            yield line, cells

    def _jsonl_rows(self, text: io.TextIOWrapper) -> Iterator[tuple[int, list[str]]]:
        names: list[str] = []
        for number, line in enumerate(text, 1):
            if not line.strip():
                yield number, [""]
                continue
            try:
                value = json.loads(line)
            except (json.JSONDecodeError, RecursionError):
                self.report.reject("not JSON", number)
                continue
            if isinstance(value, dict):
                # A known name counts even where the first row has null for it.
                usable = [key for key, cell in value.items() if isinstance(cell, str) or key.lower() in _ROLE]
                if not names and usable:
                    names = self._choose_columns(usable)
                value = [value.get(name) for name in names]
            cells = value if isinstance(value, list) else [value]
            if not cells or not all(isinstance(cell, str) for cell in cells):
                self.report.reject("not text", number)
                continue
            yield number, cells

    def _parquet_rows(self) -> Iterator[tuple[int, list[str]]]:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise FastpromptError(
                f"{self.path}: reading .parquet needs pyarrow; install it with pip install 'fastprompt[parquet]'"
            ) from None

        def is_text(kind: Any) -> bool:
            if pa.types.is_dictionary(kind):
                kind = kind.value_type
            return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))

        def texts(column: Any) -> list[str]:
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            # As bytes, since pyarrow does not check that its strings are UTF-8.
            values = column.cast(pa.large_binary()).to_pylist()
            return ["" if v is None else v.decode("utf-8", errors="surrogateescape") for v in values]

        try:
            with self._open() as source:
                table = pq.ParquetFile(source)
                names = self._choose_columns([f.name for f in table.schema_arrow if is_text(f.type)])
                number = 0
                for batch in table.iter_batches(batch_size=8192, columns=names):
                    for cells in zip(*(texts(batch.column(name)) for name in names), strict=True):
                        number += 1
                        yield number, list(cells)
        except (pa.ArrowInvalid, OSError) as error:
            if isinstance(error, gzip.BadGzipFile):
                raise
            raise FastpromptError(f"{self.path}: damaged parquet file ({error}); fetch or write it again") from None

    def _choose_columns(self, available: list[str]) -> list[str]:
        """The columns with known names, in the order of their roles; without any, all of them if they are 1 to 3."""
        by_role: dict[int, str] = {}
        for name in available:
            role = _ROLE.get(name.lower())
            if role is not None and by_role.setdefault(role, name) != name:
                raise FastpromptError(
                    f"{self.path}: columns {by_role[role]!r} and {name!r} may both be the {_ROLE_NAMES[role]}; "
                    "name the columns sent0, sent1 (the positive) and hard_neg"
                )
        if by_role:
            if sorted(by_role) != list(range(len(by_role))):
                missing = next(role for role in range(3) if role not in by_role)
                raise FastpromptError(
                    f"{self.path}: columns {available} lack the {_ROLE_NAMES[missing]}; "
                    "name the columns sent0, sent1 (the positive) and hard_neg"
                )
            return [by_role[role] for role in sorted(by_role)]
        if 1 <= len(available) <= 3:
            return available
        raise FastpromptError(
            f"{self.path}: cannot tell which of the columns {available} hold the sentences; name them "
            "sent0, sent1 (the positive) and hard_neg"
        )
