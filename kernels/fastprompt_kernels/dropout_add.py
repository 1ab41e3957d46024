# SPDX-License-Identifier: Apache-2.0
"""Dropout and the residual sum of a transformer block, with decisions that follow from a seed.

    out = residual + keep ∘ hidden_states / (1 − p)

Backward: ∂hidden_states = keep ∘ ∂out / (1 − p), ∂residual = ∂out.

Source: dropout (Srivastava et al., 2014), section 4, on a sub-layer's output before the residual sum (Vaswani et al.,
2017, section 5.4).
"""

from typing import Any

import torch
from torch import Tensor

from fastprompt_kernels import counter_rng
from fastprompt_kernels.dispatch import check_tensors, choose_backend
from fastprompt_kernels.operators import chosen, differentiable

MAX_WIDTH = 4 * counter_rng.COLUMN_GROUPS
CHUNK = 2**19
"""Decisions that a CPU draws at a time: their random numbers stay in the cache."""


def dropout_add(
    hidden_states: Tensor, residual: Tensor | None, *, dropout_p: float, seed: int, backend: str | None = None
) -> Tensor:
    """``residual`` plus ``hidden_states`` with dropout.

    The decision for (row, feature) follows from ``seed`` and those two numbers alone: the same on every backend, and
    again when a checkpointed layer runs a second time. Triton draws it once more in the backward; torch, to which
    drawing is dear, keeps one byte a value.

    Args:
        hidden_states: [T, H], float, H up to 65,536.
        residual: [T, H], or None for dropout alone.
        dropout_p: in [0, 1), rounded to 1/65,536.
        seed: any integer; another one for each layer and step.
        backend: see ``fastprompt_kernels.dispatch``; None for the default.

    Returns:
        [T, H] in the dtype of ``hidden_states``.

    Raises:
        ValueError: shapes, dtypes, devices or a probability that do not fit.
    """
    if hidden_states.ndim != 2 or (residual is not None and residual.shape != hidden_states.shape):
        shapes = [tuple(t.shape) for t in (hidden_states, residual) if t is not None]
        raise ValueError(f"dropout_add wants hidden_states and residual [T, H], got {' and '.join(map(str, shapes))}")
    if hidden_states.shape[1] > MAX_WIDTH:
        raise ValueError(f"dropout_add wants rows of up to {MAX_WIDTH} values, got {hidden_states.shape[1]}")
    check_tensors("dropout_add", hidden_states=hidden_states, residual=residual)
    counter_rng.check_probability("dropout_add", dropout_p)
    if dropout_p == 0 or not hidden_states.numel():
        return hidden_states if residual is None else hidden_states + residual
    kind = choose_backend("dropout_add", backend, hidden_states)
    if kind == "reference":
        return dropout_add_reference(hidden_states, residual, dropout_p=dropout_p, seed=seed)
    out: Tensor = _dropout_add(hidden_states, residual, float(dropout_p), seed, kind)[0]
    return out


def dropout_add_reference(hidden_states: Tensor, residual: Tensor | None, *, dropout_p: float, seed: int) -> Tensor:
    """``dropout_add`` as the formula says: the oracle."""
    rows = torch.arange(len(hidden_states), device=hidden_states.device)
    keep = counter_rng.keep_mask(seed, rows, 1, hidden_states.shape[1], dropout_p)[0]
    dropped = hidden_states * keep * counter_rng.keep_scale(dropout_p)
    return dropped if residual is None else dropped + residual


def _forward(
    hidden_states: Tensor, residual: Tensor | None, dropout_p: float, seed: int, backend: str
) -> tuple[Tensor, Tensor]:
    """(result, what was kept: [T, H], int8; [0] with Triton)"""
    out = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
    if backend == "triton":
        from fastprompt_kernels import dropout_add_triton

        dropout_add_triton.run(hidden_states, residual, out, dropout_p, seed)
        return out, out.new_empty(0, dtype=torch.int8)
    kept = torch.empty(out.shape, dtype=torch.int8, device=out.device)
    factor = counter_rng.keep_scale(dropout_p)
    step = max(1, CHUNK // max(1, out.shape[1]))
    for first in range(0, len(out), step):
        chunk = slice(first, min(first + step, len(out)))
        rows = torch.arange(chunk.start, chunk.stop, device=out.device)
        keep = counter_rng.keep_mask(seed, rows, 1, out.shape[1], dropout_p)[0]
        kept[chunk] = keep
        _apply(hidden_states[chunk], keep, factor, None if residual is None else residual[chunk], out[chunk])
    return out, kept


def _backward(upstream: Tensor, kept: Tensor, dropout_p: float, seed: int, backend: str) -> Tensor:
    gradient = torch.empty_like(upstream, memory_format=torch.contiguous_format)
    if backend == "triton":
        from fastprompt_kernels import dropout_add_triton

        dropout_add_triton.run(upstream, None, gradient, dropout_p, seed)
    else:
        _apply(upstream, kept, counter_rng.keep_scale(dropout_p), None, gradient)
    return gradient


def _apply(values: Tensor, keep: Tensor, factor: float, residual: Tensor | None, out: Tensor) -> None:
    mask = keep.to(values.dtype)
    if residual is None:
        torch.mul(values, mask.mul_(factor), out=out)
    else:
        torch.addcmul(residual, values, mask, value=factor, out=out)


_forward_op = torch.library.custom_op("fastprompt::dropout_add", _forward, mutates_args=())
_backward_op = torch.library.custom_op("fastprompt::dropout_add_backward", _backward, mutates_args=())


@_forward_op.register_fake
def _(hidden_states, residual, dropout_p, seed, backend):  # type: ignore[no-untyped-def]
    kept = hidden_states.new_empty(0 if backend == "triton" else hidden_states.shape, dtype=torch.int8)
    return hidden_states.new_empty(hidden_states.shape), kept


@_backward_op.register_fake
def _(upstream, kept, dropout_p, seed, backend):  # type: ignore[no-untyped-def]
    return upstream.new_empty(upstream.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.settings = inputs[2:]


def _autograd(ctx: Any, upstream: Tensor, _: Any) -> Any:
    hidden_states = residual = None
    if ctx.needs_input_grad[0]:
        hidden_states = chosen(ctx, _backward_op, _backward)(upstream, *ctx.saved_tensors, *ctx.settings)
    if ctx.needs_input_grad[1]:
        residual = upstream
    return hidden_states, residual, None, None, None


_dropout_add = differentiable(_forward_op, _forward, _setup, _autograd)
