# SPDX-License-Identifier: Apache-2.0
"""Packed attention in torch: sequences of similar length side by side, recomputed in the backward.

Lengths are rounded up to multiples of 8, and a bucket is cut into pieces whose scores fit into the cache. Nothing of
[sequences, heads, L, L] outlives its piece.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from fastprompt_kernels import counter_rng

SCORE_BYTES = 4 * 2**20
"""Size of a piece's scores."""


@dataclass(frozen=True)
class _Piece:
    """Some sequences, padded to one shape. Indices of padding repeat the sequence's last row."""

    keys: Tensor  # [n, L] rows of key and value
    is_key: Tensor  # [n, L]
    queries: Tensor  # [n, M] rows of query
    is_query: Tensor  # [n, M]
    full: bool  # no padding among the keys


def _pieces(cu_seqlens: Tensor, query_starts: Tensor, num_heads: int, itemsize: int) -> Iterator[_Piece]:
    device = cu_seqlens.device
    starts, query_firsts = cu_seqlens.tolist(), query_starts.tolist()
    sizes = [
        (-(-(starts[s + 1] - starts[s]) // 8) * 8, query_firsts[s + 1] - query_firsts[s], s)
        for s in range(len(starts) - 1)
        if starts[s + 1] > starts[s] and query_firsts[s + 1] > query_firsts[s]
    ]
    for length, bucket in groupby(sorted(sizes), key=lambda size: size[0]):
        members = list(bucket)
        most = members[-1][1]
        count = max(1, SCORE_BYTES // (num_heads * length * most * itemsize))
        for first in range(0, len(members), count):
            numbers = torch.tensor([s for _, _, s in members[first : first + count]], device=device)
            keys, is_key = _padded(cu_seqlens, numbers)
            queries, is_query = _padded(query_starts, numbers)
            yield _Piece(keys, is_key, queries, is_query, bool(is_key.all()))


def _padded(starts: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    first = starts[numbers].unsqueeze(1)
    lengths = starts[numbers + 1].unsqueeze(1) - first
    place = torch.arange(int(lengths.max()), device=starts.device)
    return first + torch.minimum(place, lengths - 1), place < lengths


def _heads_first(rows: Tensor, index: Tensor) -> Tensor:
    """[n, heads, L, head_dim] of packed rows."""
    return rows[index].transpose(1, 2)


def _weights(query: Tensor, key: Tensor, piece: _Piece, scale: float) -> Tensor:
    """softmax(scale · Q Kᵀ), [n, heads, M, L], float32 or wider."""
    scores = torch.matmul(query, key.transpose(2, 3))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(scale)
    if not piece.full:
        scores.masked_fill_(~piece.is_key[:, None, None, :], float("-inf"))
    return torch.softmax(scores, -1)


def _keep(piece: _Piece, query_rows: Tensor | None, num_heads: int, dropout_p: float, seed: int) -> Tensor:
    rows = piece.queries if query_rows is None else query_rows[piece.queries]
    mask = counter_rng.keep_mask(seed, rows, num_heads, piece.keys.shape[1], dropout_p)
    return mask.transpose(0, 1)


def forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, query_rows: Tensor | None,
    max_seqlen: int, scale: float, dropout_p: float, seed: int,
) -> Tensor:  # fmt: skip
    """See ``packed_attention``."""
    out = query.new_empty(query.shape)
    starts = cu_seqlens if query_rows is None else torch.searchsorted(query_rows, cu_seqlens)
    for piece in _pieces(cu_seqlens, starts, query.shape[1], 4):
        weights = _weights(_heads_first(query, piece.queries), _heads_first(key, piece.keys), piece, scale)
        if dropout_p > 0:
            weights.mul_(_keep(piece, query_rows, query.shape[1], dropout_p, seed)).mul_(
                counter_rng.keep_scale(dropout_p)
            )
        values = torch.matmul(weights.to(query.dtype), _heads_first(value, piece.keys))
        _scatter(out, piece.queries, piece.is_query, values)
    return out


def backward(
    upstream: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, query_rows: Tensor | None,
    max_seqlen: int, scale: float, dropout_p: float, seed: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value."""
    query_gradient = query.new_empty(query.shape)
    key_gradient, value_gradient = key.new_zeros(key.shape), value.new_zeros(value.shape)
    starts = cu_seqlens if query_rows is None else torch.searchsorted(query_rows, cu_seqlens)
    for piece in _pieces(cu_seqlens, starts, query.shape[1], 4):
        q, k, v = (
            _heads_first(query, piece.queries), _heads_first(key, piece.keys), _heads_first(value, piece.keys)
        )  # fmt: skip
        du = _heads_first(upstream, piece.queries).masked_fill(~piece.is_query[:, None, :, None], 0.0)
        weights = _weights(q, k, piece, scale)
        dropped = weights
        weight_gradient = torch.matmul(du, v.transpose(2, 3)).to(weights.dtype)
        if dropout_p > 0:
            factor = _keep(piece, query_rows, query.shape[1], dropout_p, seed).to(weights.dtype)
            factor.mul_(counter_rng.keep_scale(dropout_p))
            dropped = weights * factor
            weight_gradient.mul_(factor)
        _scatter(value_gradient, piece.keys, piece.is_key, torch.matmul(dropped.to(query.dtype).transpose(2, 3), du))
        along = torch.linalg.vecdot(weights, weight_gradient).unsqueeze(-1)
        score_gradient = weight_gradient.sub_(along).mul_(weights).mul_(scale).to(query.dtype)
        _scatter(query_gradient, piece.queries, piece.is_query, torch.matmul(score_gradient, k))
        _scatter(key_gradient, piece.keys, piece.is_key, torch.matmul(score_gradient.transpose(2, 3), q))
    return query_gradient, key_gradient, value_gradient


def _scatter(out: Tensor, index: Tensor, inside: Tensor, values: Tensor) -> None:
    """Write the rows that are not padding; each has one place."""
    out[index[inside]] = values.transpose(1, 2)[inside]
