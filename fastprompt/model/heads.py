# SPDX-License-Identifier: Apache-2.0
"""Projection heads on the [MASK] state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM
from transformers.activations import ACT2FN

from fastprompt.errors import FastpromptError


class TanhMLP(nn.Module):
    """tanh(W x + b): SimCSE's and PromptBERT's head, applied after the delta is subtracted. [N, H] → [N, H]."""

    def __init__(self, hidden_size: int, initializer_range: float) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)
        nn.init.normal_(self.dense.weight, std=initializer_range)
        nn.init.zeros_(self.dense.bias)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.tanh(self.dense(rows))


class MLMTransform(nn.Module):
    """LayerNorm(act(W x + b)): the masked-LM head's transform (the published ``org_mlp``). [N, H] → [N, H].

    It is applied to the [MASK] state and to the delta, before the subtraction.
    """

    def __init__(self, hidden_size: int, activation: str, layer_norm_eps: float) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.activation = ACT2FN[activation]
        self.layer_norm = nn.LayerNorm(hidden_size, eps=layer_norm_eps)

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.layer_norm(self.activation(self.dense(rows)))
        return output


def new_head(kind: str, config: Any) -> nn.Module | None:
    """A freshly initialised head for a backbone with this transformers config; None for kind "none"."""
    if kind == "tanh_mlp":
        return TanhMLP(config.hidden_size, config.initializer_range)
    if kind == "mlm_transform":
        # RoBERTa's masked-LM head is fixed to gelu, BERT's follows the config.
        activation = config.hidden_act if config.model_type == "bert" else "gelu"
        return MLMTransform(config.hidden_size, activation, config.layer_norm_eps)
    return None


def load_mlm_transform(head: MLMTransform, path: str) -> None:
    """Copy the pretrained masked-LM head of the checkpoint at ``path`` into ``head``.

    Raises:
        FastpromptError: the checkpoint has no masked-LM head.
    """
    model, info = AutoModelForMaskedLM.from_pretrained(path, output_loading_info=True)
    if hasattr(model, "cls"):
        prefix, source, norm = "cls.predictions.transform.", model.cls.predictions.transform, "LayerNorm"
    else:
        prefix, source, norm = "lm_head.", model.lm_head, "layer_norm"
    if any(key.startswith((f"{prefix}dense", f"{prefix}{norm}")) for key in info["missing_keys"]):
        raise FastpromptError(
            f"{path} has no pretrained masked-LM head, which head mlm_transform starts from; "
            "use head tanh_mlp or a masked-LM checkpoint"
        )
    head.dense.load_state_dict(source.dense.state_dict())
    head.layer_norm.load_state_dict(getattr(source, norm).state_dict())
