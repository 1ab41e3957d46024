# SPDX-License-Identifier: Apache-2.0
"""Recipes, settings, the encoder's settings file, and DeepSpeed configs."""

import json
from dataclasses import replace

import pytest
from support import ROOT

from fastprompt.config import (
    EncoderConfig,
    TrainConfig,
    build_train_config,
    dump_yaml,
    encoder_from_json,
    encoder_to_json,
    recipe_names,
)
from fastprompt.deepspeed_config import load_deepspeed_config, zero_stage
from fastprompt.errors import FastpromptError
from fastprompt.prompts import Template


def test_the_shipped_recipes():
    assert recipe_names() == [
        "demo",
        "unsup-bert-base",
        "unsup-bert-large",
        "unsup-roberta-base",
        "unsup-roberta-large",
    ]
    for name in recipe_names():
        config = build_train_config(name, {})
        assert config.encoder.templates == config.templates
        assert [str(Template.parse(text)) for text in config.templates] == list(config.templates)


def test_the_published_bert_large_recipe():
    config = build_train_config("unsup-bert-large", {})
    expected = {
        "model": "bert-large-uncased", "templates": ('This sentence of "{sentence}" means [MASK].',), "delta": True,
        "delta_at_evaluation": False, "head": "tanh_mlp", "head_at_evaluation": False, "global_batch_size": 256,
        "learning_rate": 3e-5, "warmup_steps": 0, "num_train_epochs": 1.0, "max_sentence_tokens": 32,
        "temperature": 0.05, "eval_steps": 125, "metric_for_best_model": "eval_stsb_spearman",
    }  # fmt: skip
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(("name", "rate"), [("unsup-bert-base", 1e-5), ("unsup-roberta-base", 1e-5)])
def test_the_published_base_recipes(name, rate):
    config = build_train_config(name, {})
    assert (len(config.templates), config.global_batch_size, config.learning_rate) == (2, 256, rate)


def test_flags_override_the_recipe_and_the_dump_is_a_recipe(tmp_path):
    config = build_train_config("demo", {"learning_rate": 1.0, "templates": ("{sentence} [MASK]",)})
    assert (config.learning_rate, config.global_batch_size) == (1.0, 64)
    (tmp_path / "mine.yaml").write_text(dump_yaml(config))
    again = build_train_config(str(tmp_path / "mine.yaml"), {})
    assert replace(again, recipe="demo") == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1", "unknown setting 'learning_rat'"),
        ("learning_rate: fast", "learning_rate must be of type float, got 'fast'"),
        ("max_steps: 1.5", "max_steps must be of type int, got 1.5"),
        ("delta: 3", "delta must be of type bool, got 3"),
        ("templates: [1]", "templates must be of type list of texts"),
        ("- a list", "must be a mapping of settings"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_bad_recipe_files(tmp_path, text, message):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(FastpromptError, match=message):
        build_train_config(str(tmp_path / "bad.yaml"), {})


def test_unknown_recipe():
    with pytest.raises(FastpromptError, match="no recipe 'unsup-bert-huge': it is neither a file nor one of demo, "):
        build_train_config("unsup-bert-huge", {})


def test_scientific_notation_without_a_point(tmp_path):
    (tmp_path / "r.yaml").write_text("learning_rate: 3e-5")  # YAML takes this for text
    assert build_train_config(str(tmp_path / "r.yaml"), {}).learning_rate == 3e-5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0; it must be greater than 0"),
        ({"max_steps": 0}, "max_steps is 0; it must be at least 1"),
        ({"dropout": 1.0}, r"dropout is 1.0; it must lie in \[0, 1\)"),
        ({"eval_steps": -1}, "eval_steps is -1; it must not be negative"),
        ({"seed": -1}, "seed is -1; it must lie in 0"),
        ({"precision": "int8"}, "precision is 'int8'; it must be one of fp32, bf16, bf16_autocast, fp16"),
        ({"global_batch_size": 4, "gradient_accumulation_steps": 4}, "leaves a sentence without a negative"),
    ],
)
def test_values_out_of_range(settings, message):
    with pytest.raises(FastpromptError, match=message):
        build_train_config(None, settings)


def test_encoder_settings_survive_their_file():
    config = EncoderConfig(templates=("{sentence} is [MASK]", "x"), delta=True, head="tanh_mlp", final_period=False)
    assert encoder_from_json(encoder_to_json(config), "f") == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged"),
        ('{"format_version": 99}', "has format 99 .* use the fastprompt version that wrote it"),
        ("[]", "has format None"),
    ],
)
def test_bad_encoder_settings(text, message):
    if text == "[]":
        text = '{"pooling": "mask"}'
    with pytest.raises(FastpromptError, match=message):
        encoder_from_json(text, "x/fastprompt.json")


def test_encoder_settings_of_the_wrong_type():
    text = encoder_to_json(EncoderConfig()).replace('"delta": false', '"delta": "false"')
    with pytest.raises(FastpromptError, match="delta must be of type bool, got 'false'"):
        encoder_from_json(text, "x/fastprompt.json")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pooling": "mean"}, "mean and cls pooling take none"),
        ({"pooling": "mask", "templates": ()}, "mask pooling needs a template"),
        ({"pooling": "cls", "templates": (), "delta": True}, "has no delta"),
        ({"head": "mlm_transform"}, "is kept at evaluation"),
    ],
)
def test_encoder_settings_that_make_no_sense(settings, message):
    with pytest.raises(FastpromptError, match=message):
        EncoderConfig(**settings)


RUN = TrainConfig(global_batch_size=64, gradient_accumulation_steps=2, gradient_clipping=0.5, precision="bf16")


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda path: path.name)
def test_every_shipped_deepspeed_config(path):
    values = load_deepspeed_config(replace(RUN, deepspeed_config=str(path)), world_size=4, hidden_size=32)
    assert values["train_batch_size"] == 64
    assert values["train_micro_batch_size_per_gpu"] == 8
    assert values["gradient_accumulation_steps"] == 2
    assert values["gradient_clipping"] == 0.5
    assert (values["bf16"]["enabled"], values["fp16"]["enabled"]) == (True, False)
    assert "auto" not in json.dumps(values)
    assert f"zero{zero_stage(values)}" == path.stem


def test_without_a_file_clipping_is_stated_all_the_same():
    values = load_deepspeed_config(replace(RUN, gradient_clipping=0.0), world_size=1, hidden_size=32)
    assert values["gradient_clipping"] == 0.0  # DeepSpeed's own default is 1.0
    assert zero_stage(values) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"train_batch_size": 256}, "says train_batch_size = 256, the recipe says 64 .global_batch_size."),
        ({"train_micro_batch_size_per_gpu": 8}, "train_micro_batch_size_per_gpu = 8, the recipe says 32"),
        ({"gradient_clipping": 1.0}, "says gradient_clipping = 1.0, the recipe says 0.5"),
        ({"fp16": {"enabled": True}}, "says fp16.enabled = True, the recipe says False .precision bf16."),
        ({"bf16": {"enabled": False}}, "says bf16.enabled = False, the recipe says True"),
        ({"optimizer": {"type": "AdamW"}}, "section 'optimizer', but the recipe decides it"),
        ({"scheduler": {}}, "section 'scheduler'"),
        (
            {"zero_optimization": {"stage": 2, "sub_group_size": "auto"}},
            'nothing fills "auto" at zero_optimization.sub',
        ),
        ({"zero_optimization": {"stage": 0}}, "precision bf16 .* needs ZeRO stage 1 or higher"),
        ({"bf16": True}, "bf16 must be an object"),
        ({"zero_optimization": {"stage": "two"}}, "stage is 'two'; it must be 0, 1, 2 or 3"),
        ([1], "must be a JSON object"),
    ],
)
def test_contradictions_name_both(tmp_path, content, message):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    with pytest.raises(FastpromptError, match=message):
        load_deepspeed_config(replace(RUN, deepspeed_config=str(path)), world_size=1, hidden_size=32)


def test_unreadable_deepspeed_configs(tmp_path):
    (tmp_path / "bad.json").write_text("{,}")
    with pytest.raises(FastpromptError, match="is not valid JSON"):
        load_deepspeed_config(replace(RUN, deepspeed_config=str(tmp_path / "bad.json")), 1, 32)
    with pytest.raises(FastpromptError, match="no DeepSpeed config .*absent.json"):
        load_deepspeed_config(replace(RUN, deepspeed_config=str(tmp_path / "absent.json")), 1, 32)
