# SPDX-License-Identifier: Apache-2.0
"""Packed attention in Triton: programs of one sequence and head.

    P = softmax(scale · Q Kᵀ),  P̃ = dropout(P),  O = P̃ V
    dV = P̃ᵀ dO,  dP = dropout(dO Vᵀ),  dS = P ∘ (dP − rowsum(P ∘ dP)),  dQ = scale · dS K,  dK = scale · dSᵀ Q

The forward goes over blocks of keys with an online softmax; a short sequence is one block. The backward of a short
sequence is one kernel with all keys on chip, which recomputes the softmax from Q and K and needs nothing saved. Where
that would spill (long sequences times wide heads), two kernels share the work: one owns query rows and leaves each
row's log-sum-exp and rowsum(P ∘ dP), the other owns blocks of keys. Nothing is summed with atomics. Scores are
float32.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastprompt_kernels import counter_rng
from fastprompt_kernels.counter_rng_triton import keep_mask
from fastprompt_kernels.launcher import Tile, architecture, launch


@triton.jit
def _load(ptr, rows, stride, head, head_stride, d, inside):
    return tl.load(
        ptr + rows.to(tl.int64)[:, None] * stride + head.to(tl.int64) * head_stride + d[None, :],
        mask=inside,
        other=0.0,
    )


@triton.jit
def _store(ptr, values, rows, stride, head, head_stride, d, inside):
    place = ptr + rows.to(tl.int64)[:, None] * stride + head.to(tl.int64) * head_stride + d[None, :]
    tl.store(place, values.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _scores(query, key, inside_n, scale):
    """Base-2 scores, −inf at keys outside the sequence."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * 1.4426950408889634)
    return tl.where(inside_n[None, :], scores, float("-inf"))


@triton.jit(do_not_specialize=["seed"])  # a new value every call
def _packed_attention_fwd_kernel(
    query_ptr, key_ptr, value_ptr, out_ptr, starts_ptr, query_starts_ptr, query_rows_ptr,
    num_heads, head_dim,
    query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride,
    out_stride, out_head_stride,
    scale, dropout_scale, seed, threshold,
    HAS_ROWS: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts_ptr + sequence)
    length = tl.load(starts_ptr + sequence + 1) - start
    d = tl.arange(0, BLOCK_D)
    inside_d = d < head_dim
    first, last = tl.load(query_starts_ptr + sequence), tl.load(query_starts_ptr + sequence + 1)
    for block in range(first + tl.program_id(2) * BLOCK_M, last, BLOCK_M * tl.num_programs(2)):
        m = block + tl.arange(0, BLOCK_M)
        inside_m = m < last
        inside_q = inside_m[:, None] & inside_d[None, :]
        query = _load(query_ptr, m, query_stride, head, query_head_stride, d, inside_q)
        numbers = m
        if HAS_ROWS:
            numbers = tl.load(query_rows_ptr + m, mask=inside_m, other=0)
        highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        out = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        for first_key in range(0, length, BLOCK_N):
            n = first_key + tl.arange(0, BLOCK_N)
            inside_n = n < length
            inside_kv = inside_n[:, None] & inside_d[None, :]
            key = _load(key_ptr, start + n, key_stride, head, key_head_stride, d, inside_kv)
            value = _load(value_ptr, start + n, value_stride, head, value_head_stride, d, inside_kv)
            scores = _scores(query, key, inside_n, scale)
            higher = tl.maximum(highest, tl.max(scores, 1))  # finite: each block has a key
            weights = tl.exp2(scores - higher[:, None])
            shrink = tl.exp2(highest - higher)
            total = total * shrink + tl.sum(weights, 1)
            if DROPOUT:
                weights = tl.where(
                    keep_mask(seed, numbers, n, head, num_heads, threshold), weights * dropout_scale, 0.0
                )
            out = tl.dot(weights.to(value.dtype), value, out * shrink[:, None], input_precision="ieee")
            highest = higher
        _store(out_ptr, out / total[:, None], m, out_stride, head, out_head_stride, d, inside_q)


@triton.jit(do_not_specialize=["seed"])  # a new value every call
def _packed_attention_bwd_kernel(
    query_ptr, key_ptr, value_ptr, upstream_ptr, query_gradient_ptr, key_gradient_ptr, value_gradient_ptr,
    starts_ptr, query_starts_ptr, query_rows_ptr,
    num_heads, head_dim,
    query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride,
    upstream_stride, upstream_head_stride, gradient_stride, gradient_head_stride,
    scale, dropout_scale, seed, threshold,
    HAS_ROWS: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts_ptr + sequence)
    length = tl.load(starts_ptr + sequence + 1) - start
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    inside_n, inside_d = n < length, d < head_dim
    inside_kv = inside_n[:, None] & inside_d[None, :]
    key = _load(key_ptr, start + n, key_stride, head, key_head_stride, d, inside_kv)
    value = _load(value_ptr, start + n, value_stride, head, value_head_stride, d, inside_kv)
    key_gradient = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    value_gradient = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    first, last = tl.load(query_starts_ptr + sequence), tl.load(query_starts_ptr + sequence + 1)
    for block in range(first, last, BLOCK_M):
        m = block + tl.arange(0, BLOCK_M)
        inside_m = m < last
        inside_q = inside_m[:, None] & inside_d[None, :]
        query = _load(query_ptr, m, query_stride, head, query_head_stride, d, inside_q)
        upstream = _load(upstream_ptr, m, upstream_stride, head, upstream_head_stride, d, inside_q)
        scores = _scores(query, key, inside_n, scale)
        weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
        weights /= tl.sum(weights, 1)[:, None]
        weight_gradient = tl.dot(upstream, tl.trans(value), input_precision="ieee")
        dropped = weights
        if DROPOUT:
            numbers = m
            if HAS_ROWS:
                numbers = tl.load(query_rows_ptr + m, mask=inside_m, other=0)
            keep = keep_mask(seed, numbers, n, head, num_heads, threshold)
            dropped = tl.where(keep, weights * dropout_scale, 0.0)
            weight_gradient = tl.where(keep, weight_gradient * dropout_scale, 0.0)
        # Rows outside have a zero upstream gradient, so they add nothing.
        value_gradient = tl.dot(
            tl.trans(dropped.to(upstream.dtype)), upstream, value_gradient, input_precision="ieee"
        )
        along = tl.sum(weights * weight_gradient, 1)
        score_gradient = (weights * (weight_gradient - along[:, None])).to(query.dtype)
        key_gradient = tl.dot(tl.trans(score_gradient), query, key_gradient, input_precision="ieee")
        query_gradient = tl.dot(score_gradient, key, input_precision="ieee") * scale
        _store(query_gradient_ptr, query_gradient, m, gradient_stride, head, gradient_head_stride, d, inside_q)
    _store(
        key_gradient_ptr, key_gradient * scale, start + n, gradient_stride, head, gradient_head_stride, d, inside_kv
    )
    _store(value_gradient_ptr, value_gradient, start + n, gradient_stride, head, gradient_head_stride, d, inside_kv)


@triton.jit(do_not_specialize=["seed"])
def _packed_attention_query_bwd_kernel(
    query_ptr, key_ptr, value_ptr, upstream_ptr, query_gradient_ptr, log_sum_exp_ptr, along_ptr,
    starts_ptr, query_starts_ptr, query_rows_ptr,
    num_queries, num_heads, head_dim,
    query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride,
    upstream_stride, upstream_head_stride, gradient_stride, gradient_head_stride,
    scale, dropout_scale, seed, threshold,
    HAS_ROWS: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts_ptr + sequence)
    length = tl.load(starts_ptr + sequence + 1) - start
    d = tl.arange(0, BLOCK_D)
    inside_d = d < head_dim
    first, last = tl.load(query_starts_ptr + sequence), tl.load(query_starts_ptr + sequence + 1)
    for block in range(first + tl.program_id(2) * BLOCK_M, last, BLOCK_M * tl.num_programs(2)):
        m = block + tl.arange(0, BLOCK_M)
        inside_m = m < last
        inside_q = inside_m[:, None] & inside_d[None, :]
        query = _load(query_ptr, m, query_stride, head, query_head_stride, d, inside_q)
        upstream = _load(upstream_ptr, m, upstream_stride, head, upstream_head_stride, d, inside_q)
        numbers = m
        if HAS_ROWS:
            numbers = tl.load(query_rows_ptr + m, mask=inside_m, other=0)
        highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        along = tl.zeros([BLOCK_M], dtype=tl.float32)
        for sweep in tl.static_range(2):  # first the rows' statistics, then the gradient
            gradient = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
            for first_key in range(0, length, BLOCK_N):
                n = first_key + tl.arange(0, BLOCK_N)
                inside_n = n < length
                inside_kv = inside_n[:, None] & inside_d[None, :]
                key = _load(key_ptr, start + n, key_stride, head, key_head_stride, d, inside_kv)
                value = _load(value_ptr, start + n, value_stride, head, value_head_stride, d, inside_kv)
                scores = _scores(query, key, inside_n, scale)
                weight_gradient = tl.dot(upstream, tl.trans(value), input_precision="ieee")
                if DROPOUT:
                    keep = keep_mask(seed, numbers, n, head, num_heads, threshold)
                    weight_gradient = tl.where(keep, weight_gradient * dropout_scale, 0.0)
                if sweep == 0:
                    higher = tl.maximum(highest, tl.max(scores, 1))
                    weights = tl.exp2(scores - higher[:, None])
                    shrink = tl.exp2(highest - higher)
                    total = total * shrink + tl.sum(weights, 1)
                    along = along * shrink + tl.sum(weights * weight_gradient, 1)
                    highest = higher
                else:
                    weights = tl.exp2(scores - highest[:, None])
                    score_gradient = (weights * (weight_gradient - along[:, None])).to(query.dtype)
                    gradient = tl.dot(score_gradient, key, gradient, input_precision="ieee")
            if sweep == 0:
                along /= total
                highest += tl.log2(total)
        _store(query_gradient_ptr, gradient * scale, m, gradient_stride, head, gradient_head_stride, d, inside_q)
        tl.store(log_sum_exp_ptr + head.to(tl.int64) * num_queries + m, highest, mask=inside_m)
        tl.store(along_ptr + head.to(tl.int64) * num_queries + m, along, mask=inside_m)


@triton.jit(do_not_specialize=["seed"])
def _packed_attention_key_bwd_kernel(
    query_ptr, key_ptr, value_ptr, upstream_ptr, key_gradient_ptr, value_gradient_ptr, log_sum_exp_ptr, along_ptr,
    starts_ptr, query_starts_ptr, query_rows_ptr,
    num_queries, num_heads, head_dim,
    query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride,
    upstream_stride, upstream_head_stride, gradient_stride, gradient_head_stride,
    scale, dropout_scale, seed, threshold,
    HAS_ROWS: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts_ptr + sequence)
    length = tl.load(starts_ptr + sequence + 1) - start
    d = tl.arange(0, BLOCK_D)
    inside_d = d < head_dim
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = n < length
    inside_kv = inside_n[:, None] & inside_d[None, :]
    key = _load(key_ptr, start + n, key_stride, head, key_head_stride, d, inside_kv)
    value = _load(value_ptr, start + n, value_stride, head, value_head_stride, d, inside_kv)
    key_gradient = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    value_gradient = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    first, last = tl.load(query_starts_ptr + sequence), tl.load(query_starts_ptr + sequence + 1)
    for block in range(first, last, BLOCK_M):
        m = block + tl.arange(0, BLOCK_M)
        inside_m = m < last
        inside_q = inside_m[:, None] & inside_d[None, :]
        query = _load(query_ptr, m, query_stride, head, query_head_stride, d, inside_q)
        upstream = _load(upstream_ptr, m, upstream_stride, head, upstream_head_stride, d, inside_q)
        log_sum_exp = tl.load(log_sum_exp_ptr + head.to(tl.int64) * num_queries + m, mask=inside_m, other=0.0)
        along = tl.load(along_ptr + head.to(tl.int64) * num_queries + m, mask=inside_m, other=0.0)
        weights = tl.exp2(_scores(query, key, inside_n, scale) - log_sum_exp[:, None])
        weight_gradient = tl.dot(upstream, tl.trans(value), input_precision="ieee")
        dropped = weights
        if DROPOUT:
            numbers = m
            if HAS_ROWS:
                numbers = tl.load(query_rows_ptr + m, mask=inside_m, other=0)
            keep = keep_mask(seed, numbers, n, head, num_heads, threshold)
            dropped = tl.where(keep, weights * dropout_scale, 0.0)
            weight_gradient = tl.where(keep, weight_gradient * dropout_scale, 0.0)
        value_gradient = tl.dot(
            tl.trans(dropped.to(upstream.dtype)), upstream, value_gradient, input_precision="ieee"
        )
        score_gradient = (weights * (weight_gradient - along[:, None])).to(query.dtype)
        key_gradient = tl.dot(tl.trans(score_gradient), query, key_gradient, input_precision="ieee")
    _store(
        key_gradient_ptr, key_gradient * scale, start + n, gradient_stride, head, gradient_head_stride, d, inside_kv
    )
    _store(value_gradient_ptr, value_gradient, start + n, gradient_stride, head, gradient_head_stride, d, inside_kv)


def _tile(query: Tensor, max_seqlen: int, max_queries: int, kernel: str) -> Tile:
    """Sizes that compile without spills on all architectures; see the table in kernels/README.md.

    ``kernel`` is "forward", "whole" (the one-kernel backward), "query" or "key".
    """
    arch = architecture(query.device)
    block_d = max(16, triton.next_power_of_2(query.shape[2]))
    length = max(16, triton.next_power_of_2(max_seqlen))
    if query.element_size() == 4:  # IEEE products keep their operands in each thread's registers
        block_m = 32 if kernel == "forward" or block_d <= 32 else 16
        block_n = 32 if block_d <= 32 else 16
        warps = 8 if block_d <= 32 or (kernel == "key" and block_d > 64) else 4
    elif kernel == "whole":
        block_m, block_n = 16 if length > 32 else 32, length
        warps = 8 if length * block_d > 64 * 64 and arch != "gfx942" else 4
    else:
        block_m, block_n, warps = 32, min(length, 64 if kernel == "forward" and block_d > 32 else 32), 4
    if arch == "interpreter":
        block_m = 16
    if query.element_size() == 2:
        block_m = min(block_m, max(16, triton.next_power_of_2(max_queries)))
    return Tile((("BLOCK_M", block_m), ("BLOCK_N", block_n), ("BLOCK_D", block_d)), warps, 1)


def _fits(query: Tensor, max_seqlen: int) -> bool:
    """Whether the one-kernel backward keeps K and V on chip without spilling: 16-bit, 64 × 128 at most."""
    elements = triton.next_power_of_2(max_seqlen) * triton.next_power_of_2(query.shape[2])
    return query.element_size() == 2 and elements <= 64 * 128


def _last_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@dataclass(frozen=True)
class _Call:
    """What all kernels of one call share."""

    query_starts: Tensor
    max_queries: int
    head: tuple[Any, ...]
    scalars: tuple[Any, ...]
    flags: dict[str, Any]


def _prepare(
    query: Tensor, cu_seqlens: Tensor, query_rows: Tensor | None, max_seqlen: int,
    scale: float, dropout_p: float, seed: int,
) -> _Call:  # fmt: skip
    cu_seqlens = cu_seqlens.contiguous()
    starts, most = cu_seqlens, max_seqlen
    if query_rows is not None:
        query_rows = query_rows.contiguous()
        starts = torch.searchsorted(query_rows, cu_seqlens)
        most = min(max_seqlen, -(-len(query_rows) // (len(cu_seqlens) - 1)))  # the average: a program loops over more
    scalars = (
        scale, counter_rng.keep_scale(dropout_p), counter_rng.mix_seed(seed), counter_rng.drop_threshold(dropout_p)
    )  # fmt: skip
    flags = {"HAS_ROWS": query_rows is not None, "DROPOUT": dropout_p > 0}
    return _Call(starts, max(1, most), (cu_seqlens, starts, query_rows), scalars, flags)


def forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, query_rows: Tensor | None,
    max_seqlen: int, scale: float, dropout_p: float, seed: int,
) -> Tensor:  # fmt: skip
    """See ``packed_attention``."""
    query, key, value = (_last_contiguous(t) for t in (query, key, value))
    out = query.new_empty(query.shape)
    call = _prepare(query, cu_seqlens, query_rows, max_seqlen, scale, dropout_p, seed)
    if out.numel():
        sequences, heads = len(cu_seqlens) - 1, query.shape[1]
        launch(
            _packed_attention_fwd_kernel,
            lambda c: (sequences, heads, triton.cdiv(call.max_queries, c["BLOCK_M"])),
            query, key, value, out, *call.head,
            heads, query.shape[2],
            *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *out.stride()[:2],
            *call.scalars,
            tile=_tile(query, max_seqlen, call.max_queries, "forward"),
            **call.flags,
        )  # fmt: skip
    return out


def backward(
    upstream: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, query_rows: Tensor | None,
    max_seqlen: int, scale: float, dropout_p: float, seed: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value."""
    upstream, query, key, value = (_last_contiguous(t) for t in (upstream, query, key, value))
    gradients = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
    call = _prepare(query, cu_seqlens, query_rows, max_seqlen, scale, dropout_p, seed)
    if not key.numel():
        return gradients
    sequences, heads = len(cu_seqlens) - 1, query.shape[1]
    strides = (*query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *upstream.stride()[:2])
    if _fits(query, max_seqlen):
        launch(
            _packed_attention_bwd_kernel, lambda _: (sequences, heads),
            query, key, value, upstream, *gradients, *call.head,
            heads, query.shape[2],
            *strides, *gradients[1].stride()[:2],
            *call.scalars,
            tile=_tile(query, max_seqlen, call.max_queries, "whole"),
            **call.flags,
        )  # fmt: skip
        return gradients
    log_sum_exp, along = (query.new_empty(heads, len(query), dtype=torch.float32) for _ in range(2))
    common = (len(query), heads, query.shape[2], *strides, *gradients[1].stride()[:2], *call.scalars)
    launch(
        _packed_attention_query_bwd_kernel,
        lambda c: (sequences, heads, triton.cdiv(call.max_queries, c["BLOCK_M"])),
        query, key, value, upstream, gradients[0], log_sum_exp, along, *call.head, *common,
        tile=_tile(query, max_seqlen, call.max_queries, "query"), **call.flags,
    )  # fmt: skip
    launch(
        _packed_attention_key_bwd_kernel, lambda c: (sequences, heads, triton.cdiv(max_seqlen, c["BLOCK_N"])),
        query, key, value, upstream, *gradients[1:], log_sum_exp, along, *call.head, *common,
        tile=_tile(query, max_seqlen, call.max_queries, "key"), **call.flags,
    )  # fmt: skip
    return gradients
