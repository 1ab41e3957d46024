# SPDX-License-Identifier: Apache-2.0
"""What a run refuses, and that it does so before work is lost."""

import errno
import json
import logging
import os
import shutil

import pytest
import torch
from fastprompt_kernels import get_backend
from support import ROOT, deepspeed_command
from support import run as run_command

import fastprompt.files
from fastprompt.cli import main
from fastprompt.config import build_train_config
from fastprompt.engine import joined_ranks
from fastprompt.errors import FastpromptError
from fastprompt.trainer import Trainer

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def device():
    with joined_ranks() as device:
        yield device


@pytest.fixture
def config(tiny_bert, train_file, tmp_path):
    def build(**changes):
        settings = {
            "model": tiny_bert, "train_file": train_file, "output_dir": str(tmp_path / "run"), "eval_steps": 0,
            "cache_dir": str(tmp_path / "cache"), "global_batch_size": 8, "max_steps": 4, "precision": "fp32",
        }  # fmt: skip
        return build_train_config(None, {**settings, **changes})

    return build


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_file": None}, "no training file; pass --train_file"),
        ({"metric_for_best_model": "eval_stsb_spearman", "eval_steps": 5}, "--sts_dir is not given.*--eval_steps 0"),
        ({"metric_for_best_model": "eval_mrr", "eval_steps": 5}, "--eval_file is not given"),
        ({"sts_dir": "/nonexistent", "eval_steps": 5}, "STSBenchmark: .*sts-dev.csv is missing"),
        ({"eval_file": "/nonexistent.tsv", "eval_steps": 5}, "no such file"),
        ({"max_sentence_tokens": 60}, "exceed the model's 64 positions; at most 5. fit"),
        ({"global_batch_size": 9, "gradient_accumulation_steps": 2}, "does not divide over 1 ranks × 2"),
        ({"precision": "fp16"}, "fp16 does not train on a CPU; use bf16 or fp32"),
        ({"deepspeed_config": "/nonexistent.json"}, "no DeepSpeed config /nonexistent.json"),
        ({"templates": ("no sentence [MASK]",)}, "has 0 places for the sentence"),
    ],
)
def test_bad_settings(config, device, changes, message):
    with pytest.raises(FastpromptError, match=message):
        Trainer(config(**changes), device)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xff\n"], ids=["empty", "blank", "not UTF-8"])
def test_bad_data_is_an_error_before_any_model_loads(config, device, tmp_path, content):
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(FastpromptError, match="no usable row"):
        Trainer(config(train_file=str(tmp_path / "bad.txt"), model="no/such-model"), device)


def test_an_output_folder_in_use(config, device, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("")
    with pytest.raises(FastpromptError, match="is not empty; give another --output_dir"):
        Trainer(config(), device)


def test_a_failed_start_does_not_occupy_the_folder(config, device, tmp_path):
    with pytest.raises(FastpromptError, match="cannot load a model"):
        Trainer(config(model="no/such-model"), device)
    (tmp_path / "run" / "config.yaml").write_text("left by a run that was killed before its first save")
    (tmp_path / "run" / ".checkpoint-2.tmp").mkdir()
    Trainer(config(), device)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["config.yaml"]


def test_a_resume_leaves_other_peoples_folders(config, device, tmp_path):
    Trainer(config(), device).train()
    kept, left = tmp_path / "run" / "best-backup", tmp_path / "run" / "checkpoint-2"
    kept.mkdir()
    left.mkdir()
    Trainer(config(), device, resume=True)
    assert kept.exists()
    assert not left.exists()


def test_a_resume_may_not_change_the_metric(config, device, tmp_path, train_file):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("one thing\tanother thing\nthird\tfourth\n")
    Trainer(config(eval_file=str(pairs), eval_steps=2), device).train()
    with pytest.raises(FastpromptError, match="eval_mrr chose the best checkpoint so far and no metric would now"):
        Trainer(config(), device, resume=True)


def test_resume_without_a_checkpoint(config, device):
    with pytest.raises(FastpromptError, match="nothing to resume in .*run: it has no checkpoint named 'last'"):
        Trainer(config(), device, resume=True)


def test_resume_with_other_settings_data_or_damage(config, device, tmp_path, caplog, monkeypatch):
    Trainer(config(max_steps=4), device).train()
    last = tmp_path / "run" / "last"

    def refuses(message, **changes):
        with pytest.raises(FastpromptError, match=message):
            Trainer(config(**changes), device, resume=True)

    refuses("cannot resume: global_batch_size was 8 and is 16 now", global_batch_size=16)
    refuses("cannot resume: max_steps was 4 and is 9 now", max_steps=9)
    (tmp_path / "other.txt").write_text("Another sentence.\n" * 30)
    refuses("cannot resume: data_hash was '.*' and is '.*' now", train_file=str(tmp_path / "other.txt"))
    environment = json.loads((last / "environment.json").read_text())
    for key, value in [("world_size", 8), ("zero_stage", 3)]:
        (last / "environment.json").write_text(json.dumps({**environment, key: value}))
        refuses(f"cannot resume: {key} was {value} and is 1 now")
    environment["versions"]["torch"] = "1.0"
    (last / "environment.json").write_text(json.dumps(environment))
    monkeypatch.setattr(logging.getLogger("fastprompt"), "propagate", True)
    Trainer(config(), device, resume=True)
    assert "resuming although torch was 1.0 and is " in caplog.text
    rng = last / "training_state" / "rng_rank0.pt"
    rng.write_bytes(b"\0" * 100)
    refuses("is incomplete or damaged")
    rng.unlink()
    refuses("is incomplete or damaged")
    shutil.rmtree(last / "training_state" / "engine")
    refuses("start a new run")
    (last / "environment.json").write_text("{")
    refuses("environment.json is missing or damaged")


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_good_checkpoint(config, device, tmp_path):
    trainer = Trainer(config(learning_rate=1e-6, save_steps=2, max_steps=9), device)
    step = trainer._step

    def poisoned(batches, stop):
        if trainer.state.global_step == 3:
            next(trainer.engine.module.parameters()).data.fill_(float("nan"))
        return step(batches, stop)

    trainer._step = poisoned
    with pytest.raises(FastpromptError, match="the loss is nan at step 4; .*lower learning_rate"):
        trainer.train()
    assert os.readlink(tmp_path / "run" / "last") == "checkpoint-2"


def test_a_full_disk_while_saving_keeps_the_last_checkpoint(config, device, tmp_path, monkeypatch):
    trainer = Trainer(config(save_steps=2, max_steps=6), device)
    publish = fastprompt.files.os.fsync

    def fsync(descriptor):
        if trainer.state.global_step == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        publish(descriptor)

    monkeypatch.setattr(fastprompt.files.os, "fsync", fsync)
    with pytest.raises(FastpromptError, match="cannot write .*: No space left on device; free some space"):
        trainer.train()
    monkeypatch.undo()
    assert os.readlink(tmp_path / "run" / "last") == "checkpoint-2"
    resumed = Trainer(config(save_steps=2, max_steps=6), device, resume=True)
    assert resumed.state.global_step == 2
    assert not [p for p in (tmp_path / "run").iterdir() if p.name.startswith(".")]
    assert resumed.train().finished


def test_the_command_line_prints_one_sentence(capsys):
    assert main(["train", "--recipe", "unsup-bert-huge"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no recipe 'unsup-bert-huge'")
    assert len(error.splitlines()) == 1
    with pytest.raises(SystemExit):
        main(["eval", "m", "--sts_dir", "d", "--batch_size", "0"])
    assert "'0' is not a whole number of at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "--seeds", "1,x"])
    assert "not a comma-separated list of whole numbers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda", "FASTPROMPT_BACKEND: there is no backend 'cuda'; choose one of auto, reference, torch, triton"),
        ("triton", "FASTPROMPT_BACKEND=triton needs a CUDA or HIP GPU, and torch sees none"),
    ],
)
def test_the_kernels_backend_is_checked_before_anything_is_read(monkeypatch, capsys, tmp_path, name, message):
    if name == "triton" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setenv("FASTPROMPT_BACKEND", name)
    absent = str(tmp_path / "absent.txt")
    assert main(["train", "--recipe", "demo", "--train_file", absent, "--output_dir", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert get_backend() == "auto"  # a refused choice does not stay


def test_an_error_on_all_ranks_ends_the_launcher(tiny_bert, train_file, tmp_path):
    config = tmp_path / "ds.json"
    config.write_text('{"train_batch_size": 256}')
    arguments = ["--model", tiny_bert, "--train_file", train_file, "--output_dir", str(tmp_path / "run")]
    arguments += ["--cache_dir", str(tmp_path / "c"), "--eval_steps", "0", "--global_batch_size", "8"]
    command = deepspeed_command(2, *arguments, "--deepspeed_config", str(config))
    result = run_command(command, expect=2)
    assert "says train_batch_size = 256, the recipe says 8 (global_batch_size)" in result.stderr
    assert str(ROOT / "train.py") in command
