# SPDX-License-Identifier: Apache-2.0
"""Configuration: a recipe file, overridden by flags, becomes a frozen dataclass. Nothing else holds settings.

``EncoderConfig`` is what turns text into an embedding; it is saved in every checkpoint as ``fastprompt.json``, so
that training and evaluation cannot disagree. ``TrainConfig`` is one training run.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from fastprompt.errors import FastpromptError
from fastprompt.prompts import EXAMPLE

POOLINGS = ("mask", "mean", "cls")
HEADS = ("none", "tanh_mlp", "mlm_transform")
PRECISIONS = ("fp32", "bf16", "bf16_autocast", "fp16")
METRICS = {"eval_stsb_spearman": "sts_dir", "eval_mrr": "eval_file"}
"""Metrics that can choose the best checkpoint, and the setting that each of them needs."""


def _setting(default: Any, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class EncoderConfig:
    """How a checkpoint turns a sentence into an embedding (``fastprompt.json``).

    Attributes:
        pooling: "mask" ([MASK] state in the template), or "mean" or "cls" (plain input, no template).
        templates: one template a view; the first one is used for encoding. Empty unless pooling is "mask".
        delta: subtract the template's own [MASK] state when encoding.
        head: "none", "tanh_mlp" (dense, tanh: after the subtraction) or "mlm_transform" (the masked-LM head's
            dense, activation, LayerNorm: before the subtraction).
        head_at_evaluation: apply the head when encoding, or only in training.
        final_period: add a final "." to sentences that end in none of ``.?"'``, when encoding.
    """

    pooling: str = "mask"
    templates: tuple[str, ...] = (EXAMPLE,)
    delta: bool = False
    head: str = "none"
    head_at_evaluation: bool = False
    final_period: bool = True

    def __post_init__(self) -> None:
        _check_choice("pooling", self.pooling, POOLINGS)
        _check_choice("head", self.head, HEADS)
        if (self.pooling == "mask") != bool(self.templates):
            raise FastpromptError(
                f"pooling {self.pooling!r} with {len(self.templates)} templates: mask pooling needs a template, "
                "mean and cls pooling take none"
            )
        if self.delta and self.pooling != "mask":
            raise FastpromptError(f"pooling {self.pooling!r} has no delta; set delta to false or pool the mask")
        if self.head == "mlm_transform" and not self.head_at_evaluation:
            raise FastpromptError("head mlm_transform is kept at evaluation; set head_at_evaluation to true")

    def describe(self) -> str:
        """One line for the log."""
        parts = [f"pooling {self.pooling}"]
        if self.templates:
            parts += [f"template {self.templates[0]!r}", "with delta" if self.delta else "no delta"]
        parts.append(f"head {self.head}" if self.head_at_evaluation else "no head")
        parts.append("final period added" if self.final_period else "no final period added")
        return ", ".join(parts)


@dataclass(frozen=True)
class TrainConfig:
    """One training run. Every field is a recipe key and a command-line flag of the same name."""

    recipe: str | None = _setting(None, "recipe name or YAML file the other settings start from", free_on_resume=True)
    # Model and prompt
    model: str = _setting("bert-base-uncased", "local folder, hub name, or package:NAME of an installed package")
    templates: tuple[str, ...] = _setting((EXAMPLE,), "one template a view; the last serves any further views")
    head: str = _setting("tanh_mlp", "projection head", choices=HEADS)
    head_at_evaluation: bool = _setting(False, "keep the head when encoding")
    delta: bool = _setting(True, "subtract the template's own [MASK] state in training")
    freeze_delta: bool = _setting(False, "let no gradient flow through the delta (published: it flows)")
    delta_at_evaluation: bool = _setting(False, "subtract it when encoding too")
    final_period: bool = _setting(True, "when encoding, add '.' to sentences that end in none of .?\"'")
    dropout: float | None = _setting(None, "dropout of the encoder; the model's own when not given")
    # Data
    train_file: str | None = _setting(None, ".txt, .csv, .tsv, .jsonl or .parquet, .gz accepted", free_on_resume=True)
    max_sentence_tokens: int = _setting(32, "sentences are cut to this many tokens, template not counted")
    cache_dir: str | None = _setting(
        None, "where token caches live; by default ~/.cache/fastprompt, or under XDG_CACHE_HOME", free_on_resume=True
    )
    # Objective and optimisation
    temperature: float = _setting(0.05, "temperature of InfoNCE")
    hard_negative_weight: float = _setting(0.0, "added to the logit of a query's own hard negative")
    global_batch_size: int = _setting(256, "sentences of one optimizer step, over all ranks")
    gradient_accumulation_steps: int = _setting(1, "parts a step is cut into; each part sees only its own negatives")
    learning_rate: float = _setting(3e-5, "peak learning rate; decays linearly to 0")
    warmup_steps: int = _setting(0, "steps of linear warm-up")
    weight_decay: float = _setting(0.0, "AdamW's decoupled weight decay")
    adam_beta1: float = _setting(0.9, "AdamW's beta1")
    adam_beta2: float = _setting(0.999, "AdamW's beta2")
    adam_epsilon: float = _setting(1e-8, "AdamW's epsilon")
    gradient_clipping: float = _setting(1.0, "largest gradient norm; 0 switches clipping off")
    num_train_epochs: float = _setting(1.0, "passes over the training file")
    max_steps: int | None = _setting(None, "optimizer steps; overrides num_train_epochs")
    precision: str = _setting(
        "bf16",
        "bf16 and fp16 keep float32 master weights in the optimizer; bf16_autocast casts float32 weights at each use",
        choices=PRECISIONS,
    )
    gradient_checkpointing: bool = _setting(False, "keep only the layers' inputs and recompute the rest: less memory")
    tokens_per_micro_batch: int | None = _setting(
        None,
        "send at most this many tokens through the encoder at a time and recompute them in the backward pass: memory "
        "no longer grows with the batch; the loss still sees all of it",
    )
    compile: bool = _setting(False, "put the encoder's layers through torch.compile")
    deepspeed_config: str | None = _setting(
        None, "DeepSpeed JSON file; ZeRO stage 1 when not given", free_on_resume=True
    )
    # Evaluation and output
    sts_dir: str | None = _setting(
        None, "folder of the STS tasks in SentEval's layout, for STS-B dev", free_on_resume=True
    )
    eval_file: str | None = _setting(
        None, "two-column file of held-out neighbours, for MRR and recall@10", free_on_resume=True
    )
    metric_for_best_model: str | None = _setting(
        None, "which metric chooses the best checkpoint", choices=tuple(METRICS)
    )
    eval_steps: int = _setting(
        125, "evaluate every this many steps, and at the end; 0 switches evaluation off", free_on_resume=True
    )
    eval_batch_size: int = _setting(128, "sentences in one encoding batch", free_on_resume=True)
    save_steps: int = _setting(
        500, "save everything a resume needs every this many steps; 0: only at the end", free_on_resume=True
    )
    logging_steps: int = _setting(10, "log loss and learning rate every this many steps", free_on_resume=True)
    output_dir: str = _setting("runs/train", "where checkpoints and logs go", free_on_resume=True)
    seed: int = _setting(42, "seed of data order, head initialisation and dropout")
    profile: int = _setting(
        0, "profile this many steps: a table of stages and a Chrome trace in output_dir", free_on_resume=True
    )
    deterministic: bool = _setting(False, "only deterministic algorithms: same bits on the same hardware")

    def __post_init__(self) -> None:
        _check_choice("head", self.head, HEADS)
        _check_choice("precision", self.precision, PRECISIONS)
        if self.metric_for_best_model is not None:
            _check_choice("metric_for_best_model", self.metric_for_best_model, tuple(METRICS))
        for name in ("global_batch_size", "gradient_accumulation_steps", "max_sentence_tokens", "eval_batch_size",
                     "logging_steps"):  # fmt: skip
            if getattr(self, name) < 1:
                raise FastpromptError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("learning_rate", "temperature", "num_train_epochs", "adam_epsilon"):
            if not getattr(self, name) > 0:
                raise FastpromptError(f"{name} is {getattr(self, name)}; it must be greater than 0")
        for name in ("warmup_steps", "eval_steps", "save_steps", "gradient_clipping", "weight_decay", "profile"):
            if getattr(self, name) < 0:
                raise FastpromptError(f"{name} is {getattr(self, name)}; it must not be negative")
        if not 0 <= self.seed < 2**32:
            raise FastpromptError(f"seed is {self.seed}; it must lie in 0 … 2³² − 1")
        if self.max_steps is not None and self.max_steps < 1:
            raise FastpromptError(f"max_steps is {self.max_steps}; it must be at least 1")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise FastpromptError(f"dropout is {self.dropout}; it must lie in [0, 1)")
        if self.freeze_delta and not self.delta:
            raise FastpromptError(
                "freeze_delta without delta freezes nothing; set delta to true or drop freeze_delta"
            )
        if self.global_batch_size // self.gradient_accumulation_steps < 2:
            raise FastpromptError(
                f"global_batch_size {self.global_batch_size} over {self.gradient_accumulation_steps} accumulation "
                "steps leaves a sentence without a negative; use at least two sentences a part"
            )

    @property
    def encoder(self) -> EncoderConfig:
        """How the trained checkpoint will encode."""
        return EncoderConfig(
            pooling="mask",
            templates=self.templates,
            delta=self.delta_at_evaluation,
            head=self.head,
            head_at_evaluation=self.head_at_evaluation,
            final_period=self.final_period,
        )

    def trajectory(self) -> dict[str, Any]:
        """The settings that decide the sequence of losses: a resumed run must not change them."""
        return {f.name: getattr(self, f.name) for f in fields(self) if not f.metadata.get("free_on_resume")}


def recipe_names() -> list[str]:
    """The recipes that ship with the package."""
    folder = resources.files("fastprompt") / "recipes"
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def build_train_config(recipe: str | None, overrides: Mapping[str, Any]) -> TrainConfig:
    """The recipe's settings (by name, or a YAML file), overridden by ``overrides``.

    Raises:
        FastpromptError: no such recipe, an unknown key, a value of the wrong type or out of range.
    """
    values = _load_recipe(recipe) if recipe else {}
    return TrainConfig(**{**values, **overrides, "recipe": recipe})


def _load_recipe(recipe: str) -> dict[str, Any]:
    if recipe in recipe_names():
        text = (resources.files("fastprompt") / "recipes" / f"{recipe}.yaml").read_text()
    elif Path(recipe).is_file():
        text = Path(recipe).read_text()
    else:
        raise FastpromptError(f"no recipe {recipe!r}: it is neither a file nor one of {', '.join(recipe_names())}")
    try:
        values = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise FastpromptError(f"recipe {recipe!r} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise FastpromptError(f"recipe {recipe!r} must be a mapping of settings, such as 'learning_rate: 3.0e-5'")
    hints = typing.get_type_hints(TrainConfig)
    for name in values:
        if name not in hints:
            raise FastpromptError(
                f"recipe {recipe!r} has the unknown setting {name!r}; fastprompt train --help lists them all"
            )
    return {name: _coerce(name, value, hints[name], f"recipe {recipe!r}") for name, value in values.items()}


def _coerce(name: str, value: Any, hint: Any, where: str) -> Any:
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = next(option for option in typing.get_args(hint) if option is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        if isinstance(value, str):
            return (value,)
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
    elif hint is float:
        # YAML reads 3e-5 as text.
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            try:
                return float(value)
            except ValueError:
                pass
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    kind = "list of texts" if typing.get_origin(hint) is tuple else hint.__name__
    raise FastpromptError(f"{where}: {name} must be of type {kind}, got {value!r}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise FastpromptError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


def dump_yaml(config: TrainConfig) -> str:
    """The effective settings as YAML: a valid recipe file."""
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(config).items()}
    del values["recipe"]
    header = f"# Effective settings of a run (recipe: {config.recipe or 'none'}); usable as --recipe FILE.\n"
    return header + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


FORMAT_VERSION = 1


def encoder_to_json(config: EncoderConfig) -> str:
    """``fastprompt.json``'s text."""
    return json.dumps({"format_version": FORMAT_VERSION, **asdict(config)}, indent=2, ensure_ascii=False) + "\n"


def encoder_from_json(text: str, where: str) -> EncoderConfig:
    """Read ``fastprompt.json``; ``where`` names the file in errors.

    Raises:
        FastpromptError: not JSON, a newer format, missing or unknown keys.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise FastpromptError(f"{where} is damaged ({error}); restore the checkpoint") from None
    version = values.pop("format_version", None) if isinstance(values, dict) else None
    names = {f.name for f in fields(EncoderConfig)}
    if version != FORMAT_VERSION or set(values) != names:
        raise FastpromptError(
            f"{where} has format {version!r} and settings {sorted(values)}, this version reads format "
            f"{FORMAT_VERSION} with {sorted(names)}; use the fastprompt version that wrote it"
        )
    hints = typing.get_type_hints(EncoderConfig)
    return EncoderConfig(**{name: _coerce(name, value, hints[name], where) for name, value in values.items()})
