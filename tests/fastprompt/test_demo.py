# SPDX-License-Identifier: Apache-2.0
"""The demo's text and its refusals, and the progress bar."""

import io

import pytest
from rich.console import Console

import fastprompt.demo as demo
import fastprompt.progress as progress
from fastprompt.checkpoint import TrainerState
from fastprompt.data.documentation import documentation_paragraphs, split_held_out
from fastprompt.errors import FastpromptError


@pytest.fixture(scope="module")
def paragraphs():
    return documentation_paragraphs()


def test_the_documentation_gives_enough_distinct_prose(paragraphs):
    sentences = [sentence for paragraph in paragraphs for sentence in paragraph]
    assert len(sentences) >= 5_000
    assert len({sentence.lower() for sentence in sentences}) == len(sentences)
    assert all(sentence[0].isupper() and sentence[-1] in ".?!" and "  " not in sentence for sentence in sentences)
    assert documentation_paragraphs() == paragraphs


def test_held_out_pairs_are_not_trained_on(paragraphs):
    train, held_out = split_held_out(paragraphs)
    assert len(train) >= 5_000
    assert len(held_out) >= 100
    assert not {sentence for pair in held_out for sentence in pair} & set(train)


def run(folder, **changes):
    settings = {"deepspeed_config": None, "num_accelerators": 1, "max_steps": 1, "sts_dir": None}
    return demo.run_demo(output_dir=str(folder), **{**settings, **changes})


def test_the_demo_replaces_only_a_demo(tmp_path):
    (tmp_path / "thesis.txt").write_text("")
    with pytest.raises(FastpromptError, match="holds something that is not a demo; give another --output_dir"):
        run(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_too_little_documentation(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "documentation_paragraphs", lambda: [["One sentence."]])
    with pytest.raises(FastpromptError, match="gives only 1 sentences, the demo needs 5000"):
        run(tmp_path / "demo")
    assert not (tmp_path / "demo").exists()


def test_missing_sts_data(tmp_path):
    with pytest.raises(FastpromptError, match="sts-test.csv is missing"):
        run(tmp_path / "demo", sts_dir=str(tmp_path))


def test_progress_bar_on_a_terminal(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=screen, force_terminal=True, width=140))
    state = TrainerState(max_steps=4)
    with progress.TrainingProgress(state, 64, enabled=True) as bar:
        state.global_step = 3
        bar.update(1.25, 3e-5)
    shown = screen.getvalue()
    for part in ("3/4", "loss 1.2500", "lr 3.00e-05", "sentences/s", "left"):
        assert part in shown
