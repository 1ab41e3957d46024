# SPDX-License-Identifier: Apache-2.0
"""Packed attention in torch: sequences of similar length side by side, recomputed in the backward.

Sequences are sorted by length and cut into pieces whose scores fit into the cache; each piece is padded to its
longest. Nothing of [sequences, heads, L, L] outlives its piece.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fastprompt_kernels import counter_rng

SCORE_BYTES = 4 * 2**20
"""Size of a piece's scores."""


@dataclass(frozen=True)
class _Rows:
    """Where the rows of some sequences lie, padded to one length; padding repeats the sequence's last row."""

    index: Tensor  # [n, L] packed rows
    inside: Tensor  # [n, L]; False for padding
    padded: bool

    def take(self, packed: Tensor) -> Tensor:
        """[n, heads, L, head_dim]"""
        return packed.index_select(0, self.index.flatten()).unflatten(0, self.index.shape).transpose(1, 2)

    def put(self, packed: Tensor, values: Tensor) -> None:
        """Write [n, heads, L, head_dim] to where they belong; padding has no place."""
        rows, index = values.transpose(1, 2).flatten(0, 1), self.index.flatten()
        if self.padded:
            real = self.inside.flatten().nonzero().squeeze(1)
            rows, index = rows.index_select(0, real), index.index_select(0, real)
        packed.index_copy_(0, index, rows)


def _rows(starts: Tensor, numbers: Tensor) -> _Rows:
    first = starts[numbers].unsqueeze(1)
    lengths = starts[numbers + 1].unsqueeze(1) - first
    place = torch.arange(int(lengths.max()), device=starts.device)
    inside = place < lengths
    return _Rows(first + torch.minimum(place, lengths - 1), inside, not bool(inside.all()))


def _pieces(cu_seqlens: Tensor, query_starts: Tensor, num_heads: int) -> Iterator[tuple[_Rows, _Rows]]:
    """(queries, keys) of sequences whose scores fit into the cache together."""
    lengths, queries = cu_seqlens.diff().tolist(), query_starts.diff().tolist()
    order = sorted((s for s in range(len(lengths)) if lengths[s] and queries[s]), key=lambda s: lengths[s])
    while order:
        longest = lengths[order[-1]]
        count = max(1, SCORE_BYTES // (4 * num_heads * longest * min(longest, max(queries))))
        numbers = torch.tensor(order[-count:], device=cu_seqlens.device)
        del order[-count:]
        keys = _rows(cu_seqlens, numbers)
        yield keys if query_starts is cu_seqlens else _rows(query_starts, numbers), keys


def _weights(query: Tensor, key: Tensor, keys: _Rows, scale: float) -> Tensor:
    """softmax(scale · Q Kᵀ), [n, heads, M, L], float32 or wider."""
    scores = torch.matmul(query, key.transpose(2, 3)).mul_(scale)
    if keys.padded:
        bias = scores.new_zeros(keys.inside.shape).masked_fill_(~keys.inside, float("-inf"))
        scores.add_(bias[:, None, None, :])
    return torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))


def _factor(
    queries: _Rows, keys: _Rows, query_rows: Tensor | None, like: Tensor, dropout_p: float, seed: int
) -> Tensor:
    """Dropout's factor of each weight: 0, or what keeps the mean."""
    rows = queries.index if query_rows is None else query_rows[queries.index]
    keep = counter_rng.keep_mask(seed, rows, like.shape[1], keys.index.shape[1], dropout_p).transpose(0, 1)
    return keep.to(torch.promote_types(like.dtype, torch.float32)).mul_(counter_rng.keep_scale(dropout_p))


def forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, query_rows: Tensor | None,
    max_seqlen: int, scale: float, dropout_p: float, seed: int,
) -> Tensor:  # fmt: skip
    """See ``packed_attention``."""
    out = query.new_empty(query.shape)
    starts = cu_seqlens if query_rows is None else torch.searchsorted(query_rows, cu_seqlens)
    for queries, keys in _pieces(cu_seqlens, starts, query.shape[1]):
        weights = _weights(queries.take(query), keys.take(key), keys, scale)
        if dropout_p > 0:
            weights.mul_(_factor(queries, keys, query_rows, query, dropout_p, seed))
        queries.put(out, torch.matmul(weights.to(query.dtype), keys.take(value)))
    return out


def backward(
    upstream: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, query_rows: Tensor | None,
    max_seqlen: int, scale: float, dropout_p: float, seed: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value."""
    query_gradient = query.new_empty(query.shape)
    key_gradient, value_gradient = key.new_zeros(key.shape), value.new_zeros(value.shape)
    starts = cu_seqlens if query_rows is None else torch.searchsorted(query_rows, cu_seqlens)
    for queries, keys in _pieces(cu_seqlens, starts, query.shape[1]):
        q, k, v, du = queries.take(query), keys.take(key), keys.take(value), queries.take(upstream)
        if queries.padded:
            du.masked_fill_(~queries.inside[:, None, :, None], 0.0)
        weights = _weights(q, k, keys, scale)
        dropped = weights
        weight_gradient = torch.matmul(du, v.transpose(2, 3)).to(weights.dtype)
        if dropout_p > 0:
            factor = _factor(queries, keys, query_rows, query, dropout_p, seed)
            dropped = weights * factor
            weight_gradient.mul_(factor)
        keys.put(value_gradient, torch.matmul(dropped.to(query.dtype).transpose(2, 3), du))
        score_gradient = torch.ops.aten._softmax_backward_data(weight_gradient, weights, -1, weights.dtype)
        score_gradient = score_gradient.mul_(scale).to(query.dtype)
        queries.put(query_gradient, torch.matmul(score_gradient, k))
        keys.put(key_gradient, torch.matmul(score_gradient.transpose(2, 3), q))
    return query_gradient, key_gradient, value_gradient
