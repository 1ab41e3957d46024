# SPDX-License-Identifier: Apache-2.0
"""The token cache: contents, identity, concurrency, atomicity, memory."""

import json
import os
import subprocess
import sys

import pytest
from support import PACKAGED_MODEL, ROOT, TEXTS
from transformers import AutoTokenizer

import fastprompt.data.cache as cache_module
from fastprompt.data.cache import open_token_cache
from fastprompt.errors import FastpromptError
from fastprompt.model.encoder import resolve_model
from fastprompt.prompts import PromptTokenizer

PLAIN = 'This sentence of "{sentence}" means [MASK].'


def new_tokenizer(path=PACKAGED_MODEL, template=PLAIN):
    return PromptTokenizer(AutoTokenizer.from_pretrained(resolve_model(path)), [template], 64)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{a}\t{b}\n" for a, b in zip(TEXTS, reversed(TEXTS), strict=True)) + "one column only\n")
    return path


def test_tokens_and_summary(tmp_path, file):
    tokenizer = new_tokenizer()
    cache = open_token_cache(file, tokenizer, 5, tmp_path / "cache")
    assert (cache.rows, cache.columns) == (len(TEXTS), 2)
    first, cut = tokenizer.encode(TEXTS, 5)
    second, _ = tokenizer.encode(TEXTS[::-1], 5)
    for row in range(len(TEXTS)):
        assert cache[row, 0].tolist() == first[row].tolist()
        assert cache[row, 1].tolist() == second[row].tolist()
    assert "1 skipped: not 2 columns (line 13)" in cache.summary
    assert f"{2 * cut} sentences cut to 5 tokens" in cache.summary


def test_identity(tmp_path, file, tiny_roberta):
    def folders():
        return {p.name for p in (tmp_path / "cache").iterdir() if p.is_dir()}

    def build(tokenizer, max_tokens=5):
        before = folders() if (tmp_path / "cache").exists() else set()
        open_token_cache(file, tokenizer, max_tokens, tmp_path / "cache")
        return len(folders() - before)

    assert build(new_tokenizer()) == 1
    assert build(new_tokenizer()) == 0  # found again
    assert build(new_tokenizer(), max_tokens=6) == 1
    assert build(new_tokenizer(tiny_roberta, "' {sentence} ' is [MASK]")) == 1
    assert build(new_tokenizer(tiny_roberta, "({sentence} is [MASK]")) == 1  # without the space: other tokens
    file.write_text(file.read_text() + "more\trows\n")
    assert build(new_tokenizer()) == 1


OPEN = """
import sys
from pathlib import Path
from transformers import AutoTokenizer
from fastprompt.data.cache import open_token_cache
from fastprompt.model.encoder import resolve_model
from fastprompt.prompts import PromptTokenizer
model, path, folder, template = sys.argv[1:]
tokenizer = PromptTokenizer(AutoTokenizer.from_pretrained(resolve_model(model)), [template], 64)
"""


def test_concurrent_opens_build_once(tmp_path, file):
    code = OPEN + "print(open_token_cache(path, tokenizer, 8, Path(folder)).rows)"
    command = [sys.executable, "-c", code, PACKAGED_MODEL, str(file), str(tmp_path / "cache"), PLAIN]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(3)]
    outputs = [process.communicate(timeout=120)[0].split() for process in processes]
    assert outputs == [[str(len(TEXTS))]] * 3
    entries = list((tmp_path / "cache").iterdir())
    assert len([e for e in entries if e.is_dir()]) == 1
    assert not [e for e in entries if e.name.endswith(".tmp")]


def test_an_interrupted_build_leaves_nothing_that_is_read(tmp_path, file, monkeypatch):
    def fail(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cache_module, "publish_folder", fail)
    with pytest.raises(KeyboardInterrupt):
        open_token_cache(file, new_tokenizer(), 8, tmp_path / "cache")
    monkeypatch.undo()
    assert open_token_cache(file, new_tokenizer(), 8, tmp_path / "cache").rows == len(TEXTS)


def test_unwritable_cache_folder(tmp_path, file):
    (tmp_path / "in_the_way").write_text("")
    with pytest.raises(FastpromptError, match="cannot write .*in_the_way.*choose another folder"):
        open_token_cache(file, new_tokenizer(), 8, tmp_path / "in_the_way")


MEASURE = (
    OPEN
    + """
import json, resource
cache = open_token_cache(path, tokenizer, 32, Path(folder))
total = sum(len(cache[row, 0]) for row in range(0, cache.rows, 1000))
peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"rows": cache.rows, "peak_kib": peak_kib, "total": total}))
"""
)


def test_a_million_sentences_need_less_than_a_gibibyte(tmp_path):
    """Peak resident memory of a whole process, libraries included."""
    path = tmp_path / "million.txt"
    with path.open("w") as file:
        for n in range(1_000_000):
            file.write(
                f"{TEXTS[n % len(TEXTS)]} It happened {n} times before and {n * 7919 % 1000003} times since.\n"
            )
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, PACKAGED_MODEL, str(path), str(tmp_path / "cache"), PLAIN],
        capture_output=True, text=True, check=True, cwd=ROOT, env={**os.environ, "TOKENIZERS_PARALLELISM": "true"},
    )  # fmt: skip
    measured = json.loads(result.stdout.splitlines()[-1])
    assert measured["rows"] == 1_000_000
    assert measured["total"] > 15_000
    assert measured["peak_kib"] < 1 << 20
