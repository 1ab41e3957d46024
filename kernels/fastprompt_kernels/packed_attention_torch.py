# SPDX-License-Identifier: Apache-2.0
"""Packed attention in torch: sequences of similar length side by side, recomputed in the backward.

Sequences are sorted by length and cut into pieces whose scores fit into the cache; each piece is padded to its
longest. Nothing of [sequences, heads, L, L] outlives its piece. What lies where is worked out once for each
``cu_seqlens``, since every layer of an encoder asks for the same.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fastprompt_kernels import counter_rng

SCORE_BYTES = 2 * 2**20
"""Size of a piece's scores in float32."""
ALIGNMENT = 4
"""Sequences are padded to a multiple of this: four dropout decisions come from one random number."""


@dataclass(frozen=True)
class _Side:
    """Rows of n sequences, padded to one length, head by head: [n, heads, L] rows of a [T · heads, head_dim] tensor.

    Padding repeats the sequence's last row.
    """

    shape: tuple[int, int, int]
    index: Tensor  # [n · heads · L]
    inside: Tensor  # [n, L]; False for padding
    padding: Tensor | None  # the places of ``index`` that are padding; None when there is none

    def take(self, packed: Tensor) -> Tensor:
        """[n · heads, L, head_dim]"""
        n, heads, length = self.shape
        return packed.reshape(-1, packed.shape[-1]).index_select(0, self.index).view(n * heads, length, -1)


@dataclass(frozen=True)
class _Piece:
    queries: _Side
    keys: _Side
    bias: Tensor | None  # [n · heads, 1, L]: −inf for padding, else 0; None when there is no padding
    rows: Tensor  # [n, M]: number in the packed batch of each query
    begin: tuple[int, int]  # where its queries and its keys begin among those of all pieces

    def bias_like(self, query: Tensor) -> Tensor:
        return query.new_zeros(1, 1, 1) if self.bias is None else self.bias.to(query.dtype)


@dataclass(frozen=True)
class _Plan:
    pieces: list[_Piece]
    sizes: tuple[int, int]  # places of all pieces' queries and keys
    homes: tuple[Tensor, Tensor]  # for each row and head, its place among the queries and among the keys
    silent: Tensor | None  # rows · heads of sequences without a query: no gradient comes to them
    query_rows: Tensor | None  # kept alive, so that no other tensor takes its id


_plans: Any = WeakIdKeyDictionary()


def _plan(cu_seqlens: Tensor, query_rows: Tensor | None, num_heads: int) -> _Plan:
    if cu_seqlens.is_inference() or (query_rows is not None and query_rows.is_inference()):
        return _make_plan(cu_seqlens, query_rows, num_heads)
    # In-place changes count up a tensor's version.
    which = (num_heads, cu_seqlens._version, query_rows is not None and (id(query_rows), query_rows._version))
    known = _plans.setdefault(cu_seqlens, {})
    if which not in known:
        known[which] = _make_plan(cu_seqlens, query_rows, num_heads)
    plan: _Plan = known[which]
    return plan


def _make_plan(cu_seqlens: Tensor, query_rows: Tensor | None, num_heads: int) -> _Plan:
    device = cu_seqlens.device
    starts = cu_seqlens if query_rows is None else torch.searchsorted(query_rows, cu_seqlens)
    lengths, queries = cu_seqlens.diff().tolist(), starts.diff().tolist()
    order = sorted((s for s in range(len(lengths)) if lengths[s] and queries[s]), key=lambda s: lengths[s])
    pieces: list[_Piece] = []
    begin = (0, 0)
    while order:
        longest = lengths[order[-1]]
        count = max(1, SCORE_BYTES // (4 * num_heads * longest * min(longest, max(queries))))
        numbers = torch.tensor(order[-count:], device=device)
        del order[-count:]
        key_side = _side(cu_seqlens, numbers, num_heads, ALIGNMENT)
        query_side = key_side if query_rows is None else _side(starts, numbers, num_heads, 1)
        bias = None
        if key_side.padding is not None:
            bias = torch.zeros(key_side.inside.shape, device=device).masked_fill_(~key_side.inside, float("-inf"))
            bias = bias.repeat_interleave(num_heads, 0).unsqueeze(1)
        rows = query_side.index.view(query_side.shape)[:, 0] // num_heads
        rows = rows if query_rows is None else query_rows[rows]
        pieces.append(_Piece(query_side, key_side, bias, rows, begin))
        begin = (begin[0] + len(query_side.index), begin[1] + len(key_side.index))
    num_rows = len(query_rows) if query_rows is not None else int(cu_seqlens[-1])
    query_home, _ = _home([piece.queries for piece in pieces], num_rows * num_heads, device)
    key_home, silent = query_home, None
    if query_rows is not None:
        key_home, silent = _home([piece.keys for piece in pieces], int(cu_seqlens[-1]) * num_heads, device)
    return _Plan(pieces, begin, (query_home, key_home), silent, query_rows)


def _side(starts: Tensor, numbers: Tensor, num_heads: int, alignment: int) -> _Side:
    first = starts[numbers].unsqueeze(1)
    lengths = starts[numbers + 1].unsqueeze(1) - first
    place = torch.arange(-(-int(lengths.max()) // alignment) * alignment, device=starts.device)
    inside = place < lengths
    rows = (first + torch.minimum(place, lengths - 1)) * num_heads
    index = rows.unsqueeze(1) + torch.arange(num_heads, device=starts.device).unsqueeze(1)
    padding = None
    if not bool(inside.all()):
        padding = (~inside).unsqueeze(1).expand(index.shape).flatten().nonzero().squeeze(1)
    return _Side((len(numbers), num_heads, len(place)), index.flatten(), inside, padding)


def _home(sides: list[_Side], size: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Where each of ``size`` rows lies among the places of all sides; and the rows that lie nowhere."""
    home = torch.full((size,), -1, device=device)
    begin = 0
    for side in sides:
        real = side.inside.unsqueeze(1).expand(side.shape).flatten().nonzero().squeeze(1)
        home[side.index[real]] = real + begin
        begin += len(side.index)
    nowhere = (home < 0).nonzero().squeeze(1)
    return home.clamp_(min=0), nowhere if len(nowhere) else None


def _unpad(padded: Tensor, home: Tensor, silent: Tensor | None, like: Tensor) -> Tensor:
    """Rows at home again, in the shape of ``like``."""
    if not len(padded):
        return torch.zeros_like(like)
    rows = padded.index_select(0, home)
    return (rows if silent is None else rows.index_fill_(0, silent, 0.0)).view(like.shape)


def _weights(query: Tensor, key: Tensor, piece: _Piece, scale: float) -> Tensor:
    """softmax(scale · Q Kᵀ), [n · heads, M, L], float32 or wider."""
    scores = torch.baddbmm(
        piece.bias_like(query), query, key.transpose(1, 2), beta=int(piece.bias is not None), alpha=scale
    )
    return torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))


def _keep(piece: _Piece, dtype: torch.dtype, dropout_p: float, seed: int) -> Tensor:
    """1 for the weights that dropout leaves, 0 for the others, [n · heads, M, L]."""
    n, heads, length = piece.keys.shape
    keep = counter_rng.keep_mask(seed, piece.rows, heads, length, dropout_p)
    return keep.to(dtype).view(n * heads, -1, length)


def _product(left: Tensor, right: Tensor, factor: float, out: Tensor) -> None:
    """factor · left · right, written to ``out``."""
    torch.baddbmm(out, left, right, beta=0, alpha=factor, out=out)


def forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, query_rows: Tensor | None,
    max_seqlen: int, scale: float, dropout_p: float, seed: int,
) -> Tensor:  # fmt: skip
    """See ``packed_attention``."""
    plan = _plan(cu_seqlens, query_rows, query.shape[1])
    padded = query.new_empty(plan.sizes[0], query.shape[2])
    for piece in plan.pieces:
        weights = _weights(piece.queries.take(query), piece.keys.take(key), piece, scale).to(query.dtype)
        if dropout_p > 0:
            weights.mul_(_keep(piece, query.dtype, dropout_p, seed))
        _product(weights, piece.keys.take(value), counter_rng.keep_scale(dropout_p), _part(padded, piece, 0))
    return _unpad(padded, plan.homes[0], None, query)


def _part(padded: Tensor, piece: _Piece, which: int) -> Tensor:
    """A piece's queries (0) or keys (1) in a buffer for all pieces, [n · heads, length, head_dim]."""
    side = (piece.queries, piece.keys)[which]
    begin = piece.begin[which]
    n, heads, length = side.shape
    return padded[begin : begin + len(side.index)].view(n * heads, length, -1)


def backward(
    upstream: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, query_rows: Tensor | None,
    max_seqlen: int, scale: float, dropout_p: float, seed: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value."""
    plan = _plan(cu_seqlens, query_rows, query.shape[1])
    query_gradient = query.new_empty(plan.sizes[0], query.shape[2])
    key_gradient, value_gradient = key.new_empty(2, plan.sizes[1], key.shape[2])
    factor = counter_rng.keep_scale(dropout_p)
    for piece in plan.pieces:
        q, k, v = piece.queries.take(query), piece.keys.take(key), piece.keys.take(value)
        du = piece.queries.take(upstream)
        if piece.queries.padding is not None:
            du.view(-1, du.shape[-1]).index_fill_(0, piece.queries.padding, 0.0)
        weights = _weights(q, k, piece, scale)
        dropped = weights.to(query.dtype)
        weight_gradient = torch.bmm(du, v.transpose(1, 2))
        if dropout_p > 0:
            keep = _keep(piece, query.dtype, dropout_p, seed)
            dropped = dropped * keep
            weight_gradient.mul_(keep)
        _product(dropped.transpose(1, 2), du, factor, _part(value_gradient, piece, 1))
        score_gradient = torch.ops.aten._softmax_backward_data(
            weight_gradient.to(weights.dtype), weights, -1, weights.dtype
        ).to(query.dtype)
        _product(score_gradient, k, scale * factor, _part(query_gradient, piece, 0))
        _product(score_gradient.transpose(1, 2), q, scale * factor, _part(key_gradient, piece, 1))
    return (
        _unpad(query_gradient, plan.homes[0], None, query),
        _unpad(key_gradient, plan.homes[1], plan.silent, key),
        _unpad(value_gradient, plan.homes[1], plan.silent, value),
    )
