# SPDX-License-Identifier: Apache-2.0
"""Self-attention within packed short sequences, with dropout that the backward repeats from a seed.

    out[i] = Σ_j dropout(softmax_j(scale · query[i]·key[j])) value[j],    j over the sequence of row i

Source: scaled dot-product attention (Vaswani et al., 2017), equation 1; recomputation in the backward (Dao et al.,
2022).
"""

from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fastprompt_kernels import counter_rng, packed_attention_torch
from fastprompt_kernels.dispatch import check_index, check_tensors, choose_backend
from fastprompt_kernels.operators import chosen, differentiable

MAX_HEAD_DIM = 128
"""What a tile of the Triton kernels holds."""


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    max_seqlen: int,
    query_rows: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    backend: str | None = None,
) -> Tensor:
    """Attention of every token to the tokens of its own sequence.

    The dropout decision for (row, head, key) follows from ``seed`` and those three numbers alone: it is the same on
    every backend, with and without ``query_rows``, and nothing of it is stored. Gradients are deterministic.

    Args:
        query: [T, heads, head_dim], float; [M, heads, head_dim] with ``query_rows``.
        key, value: [T, heads, head_dim].
        cu_seqlens: [S + 1], int64; sequence s is rows cu_seqlens[s] to cu_seqlens[s + 1]; it may be empty.
        max_seqlen: no sequence is longer (checked on a CPU). The kernels are made for short ones, up to 128 tokens.
            Triton serves head_dim up to 128; beyond that "auto" uses torch.
        query_rows: [M], int64, ascending: the rows of the packed batch that ``query`` stands for, when only some are
            wanted (the [MASK] rows in a last layer); None for all T.
        scale: head_dim**-0.5 when None.
        dropout_p: in [0, 1), rounded to 1/65,536.
        seed: any integer; use another one each layer and step.
        backend: see ``fastprompt_kernels.dispatch``; None for the default.

    Returns:
        The shape and dtype of ``query``. Gradients to ``query``, ``key``, ``value``.

    Raises:
        ValueError: shapes, dtypes, devices, a probability, or (on a CPU) sequence bounds or rows that do not fit.
    """
    _check(query, key, value, cu_seqlens, max_seqlen, query_rows, dropout_p)
    unsupported = ""
    if query.shape[2] > MAX_HEAD_DIM:
        unsupported = f"head_dim {query.shape[2]} (it knows up to {MAX_HEAD_DIM})"
    kind = choose_backend("packed_attention", backend, query, unsupported)
    scale = query.shape[2] ** -0.5 if scale is None else scale
    if kind == "reference":
        return packed_attention_reference(
            query, key, value, cu_seqlens, query_rows=query_rows, scale=scale, dropout_p=dropout_p, seed=seed
        )
    out: Tensor = _attention(
        query, key, value, cu_seqlens, query_rows, max_seqlen, scale, float(dropout_p), seed, kind
    )
    return out


def packed_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    query_rows: Tensor | None = None,
    scale: float,
    dropout_p: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """``packed_attention`` sequence by sequence in plain torch: the oracle."""
    rows = torch.arange(len(key), device=key.device) if query_rows is None else query_rows
    outputs = [query.new_empty(0, *query.shape[1:])]
    bounds = cu_seqlens.tolist()
    for first, last in pairwise(bounds):
        chosen = (rows >= first) & (rows < last)
        q = query[chosen].transpose(0, 1)
        k, v = (t[first:last].transpose(0, 1) for t in (key, value))
        weights = torch.softmax((q @ k.transpose(1, 2)).float() * scale if q.dtype.itemsize < 4 else
                                q @ k.transpose(1, 2) * scale, -1)  # fmt: skip
        if dropout_p > 0:
            keep = counter_rng.keep_mask(seed, rows[chosen], len(q), last - first, dropout_p)
            weights = weights * keep * counter_rng.keep_scale(dropout_p)
        outputs.append((weights.to(v.dtype) @ v).transpose(0, 1))
    return torch.cat(outputs)


def _check(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, query_rows: Tensor | None,
    dropout_p: float,
) -> None:  # fmt: skip
    if query.ndim != 3 or key.ndim != 3 or key.shape != value.shape or query.shape[1:] != key.shape[1:]:
        raise ValueError(
            "packed_attention wants query, key and value [T, heads, head_dim], "
            f"got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    check_tensors("packed_attention", query=query, key=key, value=value)
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"packed_attention wants cu_seqlens [S + 1], got {tuple(cu_seqlens.shape)}")
    check_index("packed_attention", "cu_seqlens", cu_seqlens, key)
    if query_rows is None:
        if len(query) != len(key):
            raise ValueError(
                f"packed_attention wants as many queries as keys ({len(query)} for {len(key)}), or query_rows"
            )
    else:
        check_index("packed_attention", "query_rows", query_rows, key)
        if query_rows.shape != query.shape[:1]:
            raise ValueError(
                f"packed_attention wants one query a row of query_rows: {len(query)} for {tuple(query_rows.shape)}"
            )
    counter_rng.check_probability("packed_attention", dropout_p)
    if max_seqlen < 1:
        raise ValueError(f"packed_attention wants max_seqlen ≥ 1, got {max_seqlen}")


def _check_bounds(cu_seqlens: Tensor, query_rows: Tensor | None, num_rows: int, max_seqlen: int) -> None:
    """The checks that read values: on a CPU only, a GPU would have to wait."""
    if cu_seqlens.device.type != "cpu":
        return
    lengths = cu_seqlens.diff()
    low, high = (int(bound) for bound in torch.aminmax(lengths))
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != num_rows or low < 0:
        raise ValueError(
            f"packed_attention wants cu_seqlens to ascend from 0 to {num_rows}, got {cu_seqlens.tolist()}"
        )
    if high > max_seqlen:
        raise ValueError(f"packed_attention: a sequence has {high} tokens, max_seqlen says {max_seqlen}")
    if query_rows is not None and len(query_rows):
        if int(query_rows[0]) < 0 or int(query_rows[-1]) >= num_rows:
            raise IndexError(f"packed_attention: query_rows leave the rows 0 … {num_rows - 1}")
        if bool((query_rows.diff() <= 0).any()):
            raise ValueError("packed_attention wants query_rows ascending, each row once")


def _forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, query_rows: Tensor | None,
    max_seqlen: int, scale: float, dropout_p: float, seed: int, backend: str,
) -> Tensor:  # fmt: skip
    _check_bounds(cu_seqlens, query_rows, len(key), max_seqlen)
    with _no_autocast(query, backend):
        out: Tensor = _implementation(backend).forward(
            query, key, value, cu_seqlens, query_rows, max_seqlen, scale, dropout_p, seed
        )
    return out


def _backward(
    upstream: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, query_rows: Tensor | None,
    max_seqlen: int, scale: float, dropout_p: float, seed: int, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    with _no_autocast(query, backend):
        gradients: tuple[Tensor, Tensor, Tensor] = _implementation(backend).backward(
            upstream, query, key, value, cu_seqlens, query_rows, max_seqlen, scale, dropout_p, seed
        )
    return gradients


def _no_autocast(tensor: Tensor, backend: str) -> AbstractContextManager[None]:
    """Autocast would change the dtype of torch's products; Triton kernels know nothing of it."""
    return torch.autocast(tensor.device.type, enabled=False) if backend == "torch" else nullcontext()


def _implementation(backend: str) -> Any:
    if backend == "torch":
        return packed_attention_torch
    from fastprompt_kernels import packed_attention_triton

    return packed_attention_triton


_forward_op = torch.library.custom_op("fastprompt::packed_attention", _forward, mutates_args=())
_backward_op = torch.library.custom_op("fastprompt::packed_attention_backward", _backward, mutates_args=())


@_forward_op.register_fake
def _(query, *rest):  # type: ignore[no-untyped-def]
    return query.new_empty(query.shape)


@_backward_op.register_fake
def _(upstream, query, key, value, *rest):  # type: ignore[no-untyped-def]
    return tuple(t.new_empty(t.shape) for t in (query, key, value))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.settings = inputs[5:]


def _autograd(ctx: Any, upstream: Tensor) -> Any:
    gradients = chosen(ctx, _backward_op, _backward)(upstream, *ctx.saved_tensors, *ctx.settings)
    return *gradients, *[None] * 7


_attention = differentiable(_forward_op, _forward, _setup, _autograd)
