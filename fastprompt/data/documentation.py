# SPDX-License-Identifier: Apache-2.0
"""English sentences that every machine already has: the documentation of the installed Python.

They come from ``pydoc_data.topics`` (the language reference) and the docstrings of the standard library's source
files. The result depends on nothing but the installed Python.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

_SENTENCE_END = re.compile(r"(?<=[a-z)\]\"'][.?!])\s+(?=[A-Z\"'(])")
_MARKUP = re.compile(r":\w+:|\*\*?|``?|\\")
_NOT_PROSE = ("test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__", "lib2to3", "turtledemo")
_MIN_WORDS, _MAX_WORDS = 6, 50


def documentation_paragraphs() -> list[list[str]]:
    """Paragraphs of prose, each a list of sentences; no sentence occurs twice. Deterministic for a given Python."""
    seen: set[str] = set()
    paragraphs = []
    for text in _texts():
        for block in re.split(r"\n\s*\n", text):
            fresh = []
            for sentence in _sentences(block):
                key = sentence.lower()
                if key not in seen:
                    seen.add(key)
                    fresh.append(sentence)
            if fresh:
                paragraphs.append(fresh)
    return paragraphs


def split_held_out(paragraphs: list[list[str]], every: int = 10) -> tuple[list[str], list[tuple[str, str]]]:
    """Training sentences, and pairs of neighbours from about one in ``every`` paragraphs, which are held out whole.

    The choice hangs on a paragraph's text alone, so that it is the same wherever the paragraph stands.
    """
    train, held_out = [], []
    for sentences in paragraphs:
        digest = hashlib.sha256(sentences[0].encode()).digest()
        if len(sentences) > 1 and digest[0] % every == 0:
            held_out.append((sentences[0], sentences[1]))
        else:
            train += sentences
    return train, held_out


def _texts() -> Iterator[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        pass  # some distributions split it off; the docstrings remain
    else:
        yield from (topics[name] for name in sorted(topics))
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if any(part in _NOT_PROSE for part in path.relative_to(root).parts):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):  # of other people's escape sequences
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def _sentences(block: str) -> Iterator[str]:
    lines = block.splitlines()
    # Code, tables, grammar and lists are not prose.
    if any(re.match(r"\s*(>>>|\.\. |[-=+*|#]{2,}|\w+\s*::?=)", line) for line in lines) or "    " in block.strip():
        return
    text = " ".join(_MARKUP.sub("", line).strip() for line in lines)
    for sentence in _SENTENCE_END.split(text):
        sentence = " ".join(sentence.split())
        words = sentence.split(" ")
        letters = sum(char.isalpha() or char == " " for char in sentence)
        if (
            _MIN_WORDS <= len(words) <= _MAX_WORDS
            and sentence[0].isupper()
            and sentence[-1] in ".?!"
            and letters / len(sentence) >= 0.85
        ):
            yield sentence
