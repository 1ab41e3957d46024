# SPDX-License-Identifier: Apache-2.0
"""The forward pass of transformers' BERT, RoBERTa and XLM-RoBERTa on packed sequences.

Modules and weights stay transformers' own; only the order of the calls is ours. Embeddings, linear layers,
LayerNorm and FFN see all tokens as [T, H], without padding; attention knows sequences by ``cu_seqlens``. The last
layer computes the rows that are wanted and nothing else: keys and values of all tokens, the rest for one row a
sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fastprompt_kernels import dropout_add, packed_attention
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastprompt.profiling import stage
from fastprompt.prompts import MicroBatch, PackedBatch

_SEEDS_PER_LAYER = 4


class PackedForward:
    """Runs a backbone on packed batches. It owns no weights, so the backbone's state dict is what it was.

    Args:
        backbone: a transformers ``BertModel``, ``RobertaModel`` or ``XLMRobertaModel``.
    """

    def __init__(self, backbone: Any) -> None:
        self.backbone = backbone
        config = backbone.config
        # RoBERTa counts positions from padding_idx + 1.
        self.position_offset = 0 if config.model_type == "bert" else config.pad_token_id + 1
        self.configure()

    def configure(self, *, gradient_checkpointing: bool = False, compile: bool = False) -> None:
        """How to run.

        Args:
            gradient_checkpointing: recompute each layer in the backward pass instead of keeping its activations.
            compile: put the layers through ``torch.compile``, for any number of tokens.
        """
        self.gradient_checkpointing = gradient_checkpointing
        self._graphs = _CountedBackend()
        self._attend: Callable[..., Tensor] = _attention_block
        self._feed: Callable[..., Tensor] = _ffn_block
        if compile:
            self._attend = torch.compile(_attention_block, dynamic=True, backend=self._graphs)
            self._feed = torch.compile(_ffn_block, dynamic=True, backend=self._graphs)

    @property
    def graphs_compiled(self) -> int:
        """How many graphs ``torch.compile`` has made so far; each costs seconds, so they should be few."""
        return self._graphs.count

    def mask_rows(self, batch: PackedBatch) -> Tensor:
        """Last hidden state at each sequence's mask token, [N + K, H], in the order of the sequences.

        With several micro-batches, each is recomputed in the backward pass, so that the activations of only one
        exist at a time. Dropout follows from a seed and is the same again.
        """
        seed = self._draw_seed()
        several = sum(not part.frozen for part in batch.micro_batches) > 1
        rows = []
        for number, part in enumerate(batch.micro_batches):
            arguments = (*_tensors(batch, part), part.max_seqlen, _site(seed, number, self._layers()))
            if part.frozen:
                with torch.no_grad():
                    rows.append(self._run(*arguments))
            elif several and torch.is_grad_enabled():
                rows.append(_recomputed(self._run, *arguments))
            else:
                rows.append(self._run(*arguments))
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def all_rows(self, batch: PackedBatch) -> Tensor:
        """Last hidden states of all tokens, [T, H]."""
        seed = self._draw_seed()
        rows = []
        for number, part in enumerate(batch.micro_batches):
            ids, positions, cu_seqlens, _ = _tensors(batch, part)
            rows.append(
                self._run(ids, positions, cu_seqlens, None, part.max_seqlen, _site(seed, number, self._layers()))
            )
        return torch.cat(rows)

    def _layers(self) -> int:
        return len(self.backbone.encoder.layer)

    def _draw_seed(self) -> int:
        """A new seed, from torch's generator, when this pass needs one."""
        config = self.backbone.config
        needed = self.backbone.training and max(config.hidden_dropout_prob, config.attention_probs_dropout_prob) > 0
        return int(torch.randint(2**62, ())) if needed else 0

    def _run(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        query_rows: Tensor | None,
        max_seqlen: int,
        seed: int,
    ) -> Tensor:
        with stage("embed"):
            hidden = self._embed(input_ids, position_ids, seed)
        layers = self.backbone.encoder.layer
        for i, layer in enumerate(layers):
            rows = query_rows if i == len(layers) - 1 else None
            arguments = (layer, hidden, cu_seqlens, rows, max_seqlen, seed + _SEEDS_PER_LAYER * (i + 1))
            if self.gradient_checkpointing and torch.is_grad_enabled():
                hidden = _recomputed(self._layer, *arguments)
            else:
                hidden = self._layer(*arguments)
        return hidden

    def _embed(self, input_ids: Tensor, position_ids: Tensor, seed: int) -> Tensor:
        module = self.backbone.embeddings
        token_type = module.token_type_embeddings(torch.zeros(1, dtype=torch.int64, device=input_ids.device))
        positions = module.position_embeddings(position_ids + self.position_offset)
        hidden = module.LayerNorm(module.word_embeddings(input_ids) + token_type + positions)
        return _dropout(module.dropout, hidden, None, seed)

    def _layer(
        self, layer: Any, hidden: Tensor, cu_seqlens: Tensor, rows: Tensor | None, max_seqlen: int, seed: int
    ) -> Tensor:
        attention, ffn = ("attention", "ffn") if rows is None else ("last layer", "last layer")
        with stage(attention):
            hidden = self._attend(layer.attention, hidden, cu_seqlens, rows, max_seqlen, seed)
        with stage(ffn):
            return self._feed(layer, hidden, seed + 2)


class _CountedBackend:
    """torch.compile's default backend, and how often it was called."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo import lookup_backend

        self.count += 1
        return lookup_backend("inductor")(graph, inputs)


def _attention_block(
    module: Any, hidden: Tensor, cu_seqlens: Tensor, rows: Tensor | None, max_seqlen: int, seed: int
) -> Tensor:
    """LayerNorm(x + dropout(W attention(x))), [T, H], or [M, H] for some ``rows``."""
    own = module.self
    residual = hidden if rows is None else hidden.index_select(0, rows)
    heads = (own.num_attention_heads, own.attention_head_size)
    context = packed_attention(
        own.query(residual).unflatten(1, heads),
        own.key(hidden).unflatten(1, heads),
        own.value(hidden).unflatten(1, heads),
        cu_seqlens,
        max_seqlen=max_seqlen,
        query_rows=rows,
        scale=own.scaling,
        dropout_p=own.dropout.p if own.training else 0.0,
        seed=seed,
    )
    out = module.output
    normalised: Tensor = out.LayerNorm(_dropout(out.dropout, out.dense(context.flatten(1)), residual, seed + 1))
    return normalised


def _ffn_block(layer: Any, hidden: Tensor, seed: int) -> Tensor:
    """LayerNorm(x + dropout(W₂ act(W₁ x))), row by row."""
    out = layer.output
    normalised: Tensor = out.LayerNorm(_dropout(out.dropout, out.dense(layer.intermediate(hidden)), hidden, seed))
    return normalised


def _dropout(module: Any, hidden: Tensor, residual: Tensor | None, seed: int) -> Tensor:
    """[residual +] dropout(hidden), as the dropout module's probability and mode say."""
    if residual is not None and hidden.dtype != residual.dtype:
        hidden = hidden.to(residual.dtype)  # under autocast linear layers give bf16, LayerNorm float32
    return dropout_add(hidden, residual, dropout_p=module.p if module.training else 0.0, seed=seed)


def _tensors(batch: PackedBatch, part: MicroBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """input_ids, position_ids, cu_seqlens and mask rows of a micro-batch."""
    tokens, sequences = slice(*part.tokens), slice(*part.sequences)
    bounds = slice(part.sequences[0], part.sequences[1] + 1)
    cu_seqlens, masks = batch.cu_seqlens[bounds], batch.mask_index[sequences]
    if part.tokens[0]:
        cu_seqlens, masks = cu_seqlens - part.tokens[0], masks - part.tokens[0]
    return batch.input_ids[tokens], batch.position_ids[tokens], cu_seqlens, masks


def _site(seed: int, number: int, num_layers: int) -> int:
    """A micro-batch's first seed: every place where dropout acts has its own."""
    return seed + number * _SEEDS_PER_LAYER * (num_layers + 1)


def _recomputed(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    # Nothing random outside of the seeds that are passed: no state of a generator to save and restore.
    result: Tensor = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return result
