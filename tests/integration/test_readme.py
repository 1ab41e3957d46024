# SPDX-License-Identifier: Apache-2.0
"""Every command of the README is one that exists, and the ones for newcomers are run."""

import re
import shlex

import pytest
from support import ROOT, TEXTS, fastprompt

from fastprompt.cli import _parser

pytestmark = pytest.mark.integration


def readme_commands():
    text = (ROOT / "README.md").read_text()
    return [line for block in re.findall(r"```bash\n(.*?)```", text, re.S) for line in block.splitlines() if line]


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = [command.split()[1] for command in readme_commands() if command.startswith("make ")]
    assert targets == ["demo", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M)


@pytest.mark.parametrize("command", [c for c in readme_commands() if not c.startswith(("make ", "source "))])
def test_flags_are_understood(command):
    words = shlex.split(command)
    if words[0] == "fastprompt":
        arguments = words[1:]
    else:
        assert words[:2] in (["python", "train.py"], ["deepspeed", "train.py"])
        arguments = ["train", *words[2:]]
    _parser().parse_args(arguments)
    for word in words:
        if word.startswith("ds_configs/"):
            assert (ROOT / word).is_file()


def test_own_text_resume_and_seeds(tiny_bert, tmp_path):
    """The README's commands on a text file, with a tiny model and a few steps."""
    (tmp_path / "sentences.txt").write_text("\n".join(f"{t} {n}" for n in range(6) for t in TEXTS))
    (tmp_path / "pairs.tsv").write_text("\n".join(f"{t}\tSo {t}" for t in TEXTS))
    ran = 0
    for command in readme_commands():
        if not command.startswith("fastprompt train"):
            continue
        words = shlex.split(command)[1:]
        for name in ("sentences.txt", "pairs.tsv"):
            words = [str(tmp_path / name) if word == name else word for word in words]
        words = [str(tmp_path / word) if word.startswith("runs/") else word for word in words]
        small = [
            "--model",
            tiny_bert,
            "--global_batch_size",
            "16",
            "--max_steps",
            "3",
            "--cache_dir",
            str(tmp_path / "c"),
        ]
        fastprompt(*words, *small)
        ran += 1
    assert ran == 3
    assert (tmp_path / "runs" / "mine" / "last" / "model.safetensors").exists()
    assert (tmp_path / "runs" / "seeds" / "seeds.json").exists()


def test_python_example(tiny_bert):
    text = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    scope: dict = {}
    exec(code.replace("runs/wiki/best", tiny_bert), scope)
    assert scope["vectors"].shape == (2, 32)
