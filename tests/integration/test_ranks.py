# SPDX-License-Identifier: Apache-2.0
"""Training through the real launchers against a plain loop: reference objective, torch's AdamW, one process."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import ROOT, TEXTS, deepspeed_command, run
from transformers import AutoTokenizer

from fastprompt.config import build_train_config
from fastprompt.data.batching import BatchPlan
from fastprompt.data.cache import open_token_cache
from fastprompt.evaluation.neighbours import evaluate_neighbours
from fastprompt.model import PromptEncoder
from fastprompt.prompts import PromptTokenizer
from fastprompt.reference import reference_loss

pytestmark = pytest.mark.integration

STEPS = 5
# 4 full batches of 16 and a last one of 7, which two ranks cannot share evenly.
ROWS = 71
BASE = {
    "precision": "fp32",
    "dropout": 0.0,  # masks differ between one process and two
    "global_batch_size": 16,
    "num_train_epochs": 1.0,
    "learning_rate": 1e-3,
    "gradient_clipping": 1.0,
    "weight_decay": 0.01,
    "warmup_steps": 2,
    "eval_steps": 0,
    "logging_steps": 1,
    "seed": 3,
    # The gradient of the attention's key bias is zero but for rounding. With Adam's usual epsilon (1e-8) such a
    # parameter would follow the sign of rounding errors, which no two summation orders share.
    "adam_epsilon": 1e-5,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    texts = [f"{TEXTS[n % 12].rstrip('.')} at number {n}." for n in range(ROWS)]
    (folder / "texts.txt").write_text("\n".join(texts))
    triples = [f'"{t}","so {t.lower()}","{texts[-1 - n]}"' for n, t in enumerate(texts)]
    (folder / "triples.csv").write_text("\n".join(["sent0,sent1,hard_neg", *triples]))
    return folder


def oracle(model, path, settings, tmp_path):
    """Losses and parameters of an obvious training loop."""
    config = build_train_config(None, {**BASE, **settings, "model": model, "train_file": str(path)})
    torch.manual_seed(config.seed)
    encoder = PromptEncoder.from_pretrained(model, config.encoder, dropout=0.0).train()
    tokenizer = PromptTokenizer(AutoTokenizer.from_pretrained(model), config.templates, 64)
    cache = open_token_cache(path, tokenizer, config.max_sentence_tokens, tmp_path / "oracle-cache")
    plan = BatchPlan(cache.rows, config.global_batch_size, config.gradient_accumulation_steps, 1, config.seed)
    decayed = [p for p in encoder.parameters() if p.ndim > 1]
    plain = [p for p in encoder.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        eps=config.adam_epsilon,
    )
    losses = []
    for step in range(STEPS):
        parts = plan.rows(step)
        total = 0.0
        for part in parts:
            columns = [min(v, cache.columns - 1) for v in range(max(2, cache.columns))]
            views = [[cache[int(row), column] for row in part[0]] for column in columns]
            loss, _ = reference_loss(
                encoder, views, delta=config.delta, hard_negative_weight=config.hard_negative_weight
            )
            (loss / len(parts)).backward()
            total += loss.item() / len(parts)
        losses.append(total)
        torch.nn.utils.clip_grad_norm_(encoder.parameters(), config.gradient_clipping)
        warm = (step + 1) / config.warmup_steps if step < config.warmup_steps else None
        rate = config.learning_rate * (warm or (STEPS - step) / (STEPS - config.warmup_steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(encoder.named_parameters())


def flags(settings):
    for name, value in settings.items():
        yield f"--{name}"
        yield from map(str, value if isinstance(value, tuple) else (value,))


TWO_TEMPLATES = ('This sentence of "{sentence}" means [MASK].', "[MASK] is what {sentence} says")
CASES = {
    "python train.py": (1, None, "texts.txt", {}),
    "zero1": (2, "zero1", "texts.txt", {"templates": TWO_TEMPLATES}),
    "zero2-triples": (2, "zero2", "triples.csv", {"hard_negative_weight": 1.0}),
    "zero3-accumulation": (2, "zero3", "texts.txt", {"gradient_accumulation_steps": 2, "head": "mlm_transform"}),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_a_plain_loop_in_one_process(case, tiny_bert, files, tmp_path):
    ranks, stage, name, settings = CASES[case]
    given = dict(settings)
    if given.get("head") == "mlm_transform":
        given["head_at_evaluation"] = True
    losses, parameters = oracle(tiny_bert, files / name, given, tmp_path)
    arguments = [*flags({**BASE, **settings, "model": tiny_bert, "train_file": files / name})]
    arguments += ["--output_dir", str(tmp_path / "run"), "--cache_dir", str(tmp_path / "cache")]
    if "head_at_evaluation" in given:
        arguments.append("--head_at_evaluation")
    pairs = [(TEXTS[n], TEXTS[n + 1]) for n in range(0, 11, 2)]
    if case == "zero3-accumulation":  # where every forward pass of an evaluation is a collective operation
        (tmp_path / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs))
        arguments += ["--eval_file", str(tmp_path / "pairs.tsv"), "--eval_steps", "3", "--eval_batch_size", "4"]
    if stage:
        arguments += ["--deepspeed_config", str(ROOT / "ds_configs" / f"{stage}.json")]
        run(deepspeed_command(ranks, *arguments))
    else:
        run([sys.executable, str(ROOT / "train.py"), *arguments])
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    assert [entry["loss"] for entry in state["log_history"] if "loss" in entry] == pytest.approx(losses, abs=1e-5)
    saved = {f"backbone.{k}": v for k, v in load_file(tmp_path / "run" / "last" / "model.safetensors").items()}
    saved |= {f"head.{k}": v for k, v in load_file(tmp_path / "run" / "last" / "head.safetensors").items()}
    assert saved.keys() == parameters.keys()
    if case == "zero3-accumulation":
        scores = [entry["eval_mrr"] for entry in state["log_history"] if "eval_mrr" in entry]
        assert len(scores) == 3  # before the first step, after the third, at the end
        trained = PromptEncoder.from_pretrained(tmp_path / "run" / "last")
        assert scores[-1] == pytest.approx(evaluate_neighbours(trained.encode, pairs)["mrr"])
    untrained = dict(PromptEncoder.from_pretrained(tiny_bert).named_parameters())
    for key, value in saved.items():
        assert (value - parameters[key]).abs().max() <= 1e-5, key
    key = "backbone.encoder.layer.0.output.dense.weight"
    assert (saved[key] - untrained[key]).abs().max() > 1e-3  # training did move it, far beyond the tolerance
    assert not [path for path in Path(tmp_path / "run").iterdir() if path.name.startswith(".")]
