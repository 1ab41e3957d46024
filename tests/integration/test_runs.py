# SPDX-License-Identifier: Apache-2.0
"""Whole runs: killed and resumed, stopped politely, several seeds, scored from the command line."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from safetensors.torch import load_file
from support import PACKAGED_MODEL, ROOT, TEXTS, deepspeed_command, fastprompt, free_port, run
from transformers import AutoModel

from fastprompt.model import PromptEncoder

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def eval_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("eval") / "pairs.tsv"
    path.write_text("".join(f"{a}\t{b}\n" for a, b in itertools.pairwise(TEXTS)))
    return str(path)


def settings(tiny_bert, train_file, eval_file, folder, steps=60):
    # Dropout stays on: a resumed run must draw the masks that the uninterrupted one draws.
    return [
        "--model", tiny_bert, "--train_file", train_file, "--eval_file", eval_file, "--cache_dir", f"{folder}-cache",
        "--output_dir", str(folder), "--precision", "bf16", "--global_batch_size", "8", "--max_steps", str(steps),
        "--save_steps", "10", "--eval_steps", "20", "--logging_steps", "1", "--deterministic",
    ]  # fmt: skip


def read_state(folder):
    return json.loads((folder / "trainer_state.json").read_text())


def losses(state):
    return [(e["step"], e["loss"], e["learning_rate"]) for e in state["log_history"] if "loss" in e]


def scores(state):
    return [{k: v for k, v in e.items() if k.startswith("eval")} for e in state["log_history"] if "eval_mrr" in e]


def wait_for(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended before the moment to interrupt it"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def assert_equal_runs(folder, reference):
    ours, theirs = read_state(folder), read_state(reference)
    assert losses(ours) == losses(theirs)
    assert scores(ours) == scores(theirs)
    assert ours["best_metric"] == theirs["best_metric"]
    for link in ("last", "best"):
        got, want = (load_file(place / link / "model.safetensors") for place in (folder, reference))
        assert all(torch.equal(got[key], want[key]) for key in want)


def test_a_killed_rank_ends_the_run_and_a_resume_gives_the_same_losses(tiny_bert, train_file, eval_file, tmp_path):
    config = ["--deepspeed_config", str(ROOT / "ds_configs" / "zero2.json")]
    run(deepspeed_command(2, *settings(tiny_bert, train_file, eval_file, tmp_path / "whole"), *config))

    killed = tmp_path / "killed"
    arguments = [*settings(tiny_bert, train_file, eval_file, killed), *config]
    launcher = subprocess.Popen(deepspeed_command(2, *arguments), cwd=ROOT, stderr=subprocess.DEVNULL)
    wait_for((killed / "last").exists, launcher)
    ranks = [p for p in psutil.Process(launcher.pid).children(recursive=True) if "--output_dir" in p.cmdline()]
    ranks = [
        p
        for p in ranks
        if any(a.startswith("--local_rank") for a in p.cmdline()) and "launch" not in str(p.cmdline()[:4])
    ]
    assert len(ranks) == 2
    os.kill(ranks[1].pid, signal.SIGKILL)
    assert launcher.wait(timeout=60) != 0
    step = json.loads((killed / "last" / "trainer_state.json").read_text())["global_step"]
    assert 10 <= step < 60
    AutoModel.from_pretrained(killed / "last")  # whole, whatever the moment

    result = run(deepspeed_command(2, *arguments, "--resume"))
    assert f"resumed at step {step}" in result.stderr
    assert_equal_runs(killed, tmp_path / "whole")
    assert sorted(p.name for p in killed.iterdir() if not p.is_file()) == sorted(
        ["best", os.readlink(killed / "best"), "last", "checkpoint-60"]
    )


def test_sigterm_and_sigint_finish_the_step_save_and_exit_with_0(tiny_bert, train_file, eval_file, tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run([sys.executable, "train.py", *settings(tiny_bert, train_file, eval_file, whole)])
    command = [sys.executable, "train.py", *settings(tiny_bert, train_file, eval_file, stopped)]
    for number, step, more in [(signal.SIGTERM, 13, []), (signal.SIGINT, 33, ["--resume"])]:
        process = subprocess.Popen([*command, *more], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        lines = []
        while f"step {step}/60" not in (lines[-1] if lines else ""):
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines)
        process.send_signal(number)
        rest = process.communicate(timeout=60)[1]
        assert process.returncode == 0, rest
        assert re.search(r"stopped after step \d+ of 60 as asked; everything is saved, continue with --resume", rest)
        assert step <= read_state(stopped)["global_step"] < 60
    run([*command, "--resume"])
    assert_equal_runs(stopped, whole)

    # A finished run is left alone; another setting or other data is refused, another logging interval is not.
    before = (stopped / "trainer_state.json").read_text()
    assert "nothing left to train" in run([*command, "--resume", "--logging_steps", "5"]).stderr
    assert losses(json.loads(before)) == losses(read_state(stopped))
    error = run([*command, "--resume", "--learning_rate", "1e-4"], expect=2).stderr
    assert "cannot resume: learning_rate was 3e-05 and is 0.0001 now" in error


def test_what_a_run_leaves(tiny_bert, train_file, eval_file, tmp_path):
    folder = tmp_path / "run"
    run([sys.executable, "train.py", *settings(tiny_bert, train_file, eval_file, folder, steps=20)])
    state = read_state(folder)
    assert (state["global_step"], state["max_steps"], state["epoch"]) == (20, 20, pytest.approx(20 / 15))
    final = state["log_history"][-1]
    assert {
        "train_runtime",
        "train_samples_per_second",
        "train_steps_per_second",
        "train_loss",
        "epoch",
        "step",
    } <= final.keys()
    assert final["train_samples_per_second"] == pytest.approx(160 / final["train_runtime"], rel=1e-6)
    first = next(e for e in state["log_history"] if "loss" in e)
    assert {"loss", "learning_rate", "grad_norm", "epoch", "step"} <= first.keys()
    assert first["learning_rate"] == pytest.approx(3e-5)
    assert state["best_metric"] == max(s["eval_mrr"] for s in scores(state)[1:])
    environment = json.loads((folder / "best" / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__
    assert len(environment["data_hash"]) == 64
    assert environment["config"]["global_batch_size"] == 8
    again = fastprompt("train", "--recipe", str(folder / "config.yaml"), "--output_dir", str(folder), expect=2).stderr
    assert "is not empty; continue the run in it with --resume" in again
    assert PromptEncoder.from_pretrained(folder / "best").encode(["x"]).shape == (1, 32)


def test_torchrun_starts_the_same_run(tiny_bert, train_file, eval_file, tmp_path):
    arguments = settings(tiny_bert, train_file, eval_file, tmp_path / "run", steps=3)
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        str(free_port()),
    ]
    result = run([*launcher, "train.py", *arguments])
    assert "training: 2 ranks on cpu" in result.stderr
    assert read_state(tmp_path / "run")["global_step"] == 3


def test_seeds(tiny_bert, train_file, eval_file, tmp_path):
    folder = tmp_path / "runs"
    arguments = settings(tiny_bert, train_file, eval_file, folder, steps=4)
    result = fastprompt("train", *arguments, "--seeds", "0,1")
    report = json.loads((folder / "seeds.json").read_text())
    assert [entry["seed"] for entry in report["runs"]] == [0, 1]
    assert report["metric"] == "eval_mrr"
    values = [entry["best_metric"] for entry in report["runs"]]
    assert report["mean"]["best_metric"] == pytest.approx(sum(values) / 2)
    assert report["std"]["best_metric"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    assert report["runs"][0]["train_loss"] != report["runs"][1]["train_loss"]
    assert re.search(r"best_metric over 2 seeds: 0\.\d{4} ± 0\.\d{4}", result.stderr)
    # Interrupted after the first seed: it is taken as it is, the second one is run.
    (folder / "seeds.json").unlink()
    shutil.rmtree(folder / "seed-1")
    fastprompt("train", *arguments, "--seeds", "0,1", "--resume")
    assert json.loads((folder / "seeds.json").read_text()) == report
    error = fastprompt("train", *arguments, "--seeds", "5,1", expect=2).stderr
    assert "seed-1 is not empty; continue the run in it with --resume" in error
    assert not (folder / "seed-5").exists()  # found before the first run


def test_eval_command(data_dir, tmp_path):
    sts = ["--sts_dir", str(data_dir / "senteval"), "--tasks", "STSBenchmark"]
    result = fastprompt("eval", PACKAGED_MODEL, *sts, "--pooling", "mean", "--json")
    printed = json.loads(result.stdout)
    assert printed["scores"]["STSBenchmark"] == pytest.approx(82.03, abs=0.02)
    assert printed["settings"]["pooling"] == "mean"
    table = fastprompt("eval", PACKAGED_MODEL, *sts, "--pooling", "mean").stdout
    assert "| STSBenchmark |  Avg. |" in table
    assert "82.03" in table
    PromptEncoder.from_pretrained(PACKAGED_MODEL).save_pretrained(tmp_path)
    error = fastprompt("eval", str(tmp_path), *sts, "--pooling", "cls", expect=2).stderr
    assert "pooling = 'mask' of itself" in error


@pytest.mark.parametrize("command", [[], ["train"], ["eval"], ["demo"]], ids=["", "train", "eval", "demo"])
def test_help(command):
    shown = fastprompt(*command, "--help").stdout
    assert "usage: fastprompt" in shown


def test_unsupervised_training_on_wikipedia(data_dir, tmp_path):
    """150 steps of 64 sentences lift STS-B test from about 38 to at least 77.5."""
    folder = tmp_path / "wiki"
    arguments = [
        "--recipe", "demo", "--max_steps", "150", "--eval_steps", "50",
        "--train_file", str(data_dir / "wiki" / "wiki_sample.txt"), "--sts_dir", str(data_dir / "senteval"),
        "--cache_dir", str(tmp_path / "cache"), "--output_dir", str(folder),
    ]  # fmt: skip
    run([sys.executable, "train.py", *arguments])
    curve = [e["eval_stsb_spearman"] for e in read_state(folder)["log_history"] if "eval_stsb_spearman" in e]
    assert len(curve) == 4
    assert curve[0] < 0.45 < 0.8 < curve[1]
    sts = ["--sts_dir", str(data_dir / "senteval"), "--tasks", "STSBenchmark", "--json"]
    assert json.loads(fastprompt("eval", str(folder / "best"), *sts).stdout)["average"] >= 77.5
