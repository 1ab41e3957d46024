# SPDX-License-Identifier: Apache-2.0
"""The whole contrastive tail of PromptBERT without a head, in one call: gather, delta, normalisation, InfoNCE.

    z_vi = hidden_states[mask_index_vi] − delta_rows[delta_index_vi],    loss = InfoNCE(z_1, z_2; hard negatives z_3)

With "mean" and "sum" one tensor of the pooled rows' size is kept for the backward: their gradient.

Source: PromptBERT (Jiang et al., 2022), section 4.3 and equation 4; see ``mask_delta_pool`` and ``info_nce``.
"""

from typing import Any

import torch
from torch import Tensor

from fastprompt_kernels.dispatch import choose_backend
from fastprompt_kernels.info_nce import (
    InfoNCEOutput,
    check_info_nce_settings,
    info_nce_reference,
    reduce,
    rows_backward,
    rows_forward,
    sum_with_gradients,
)
from fastprompt_kernels.info_nce_torch import Scalars, project
from fastprompt_kernels.mask_delta_pool import (
    check_pool,
    mask_delta_pool_reference,
    pool_rows,
    scatter_op,
    scatter_rows,
)
from fastprompt_kernels.operators import chosen, differentiable


def prompt_info_nce(
    hidden_states: Tensor,
    mask_index: Tensor,
    delta_index: Tensor | None = None,
    delta_rows: Tensor | None = None,
    *,
    temperature: float,
    hard_negative_weight: float = 0.0,
    margin: float = 0.0,
    symmetric: bool = False,
    reduction: str = "mean",
    backend: str | None = None,
) -> InfoNCEOutput:
    """InfoNCE between the views' [MASK] embeddings, straight from the hidden states.

    Args:
        hidden_states: [T, H], float; the last hidden states of all tokens.
        mask_index: [V, B], int64; the row of each [MASK]. View 0 asks, view 1 has the positives, view 2 (if V = 3)
            the hard negatives.
        delta_index: [V, B], int64, or None for no subtraction.
        delta_rows: [K, H], float, or None exactly when ``delta_index`` is.
        temperature, hard_negative_weight, margin, symmetric, reduction, backend: see ``info_nce``.

    Returns:
        InfoNCEOutput over the B sentences. Gradients flow to ``hidden_states`` and ``delta_rows``.

    Raises:
        ValueError: what ``mask_delta_pool`` and ``info_nce`` raise, or neither two nor three views.
        IndexError: an index out of range (on CPU; on a GPU the kernel asserts under ``TRITON_DEBUG=1``).
    """
    check_pool("prompt_info_nce", hidden_states, mask_index, delta_index, delta_rows, "[V, B]", 2)
    views, count = mask_index.shape
    if views not in (2, 3) or count == 0:
        raise ValueError(
            f"prompt_info_nce wants 2 or 3 views of at least one sentence, got {tuple(mask_index.shape)}"
        )
    scalars = Scalars(temperature, 0, hard_negative_weight, margin)
    check_info_nce_settings("prompt_info_nce", scalars, reduction)
    if symmetric and views == 3:
        raise ValueError("prompt_info_nce: the symmetric loss wants no hard negatives, so two views")
    kind = choose_backend("prompt_info_nce", backend, hidden_states)
    index = mask_index.flatten(), None if delta_index is None else delta_index.flatten()
    if kind == "reference":
        pooled = mask_delta_pool_reference(hidden_states, *index, delta_rows).unflatten(0, (views, count))
        return info_nce_reference(
            pooled[0], pooled[1], temperature=temperature, hard_negative=pooled[2] if views == 3 else None,
            hard_negative_weight=hard_negative_weight, margin=margin, symmetric=symmetric, reduction=reduction,
        )  # fmt: skip
    arguments = (hidden_states, *index, delta_rows, views, temperature, hard_negative_weight, margin)
    needs_gradient = hidden_states.requires_grad or (delta_rows is not None and delta_rows.requires_grad)
    if reduction != "none" and not symmetric and torch.is_grad_enabled() and needs_gradient:
        total, log_sum_exp, positive, _ = _sum(*arguments, kind)
        return InfoNCEOutput(total / count if reduction == "mean" else total, log_sum_exp, positive)
    row_loss, log_sum_exp, positive, column_loss, _ = _rows(*arguments, symmetric, kind)
    if symmetric:
        row_loss = (row_loss + column_loss) / 2
    return InfoNCEOutput(reduce(row_loss, reduction), log_sum_exp, positive)


def _views(
    hidden_states: Tensor, mask_index: Tensor, delta_index: Tensor | None, delta_rows: Tensor | None,
    views: int, backend: str,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    pooled = pool_rows(hidden_states, mask_index, delta_index, delta_rows, backend)
    query, key, *more = pooled.chunk(views)
    return query, key, more[0] if more else None


def _sum_implementation(
    hidden_states: Tensor, mask_index: Tensor, delta_index: Tensor | None, delta_rows: Tensor | None, views: int,
    temperature: float, hard_negative_weight: float, margin: float, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(summed loss, log_sum_exp, positive) and the gradient of the pooled rows, [V·B, H]."""
    rows = _views(hidden_states, mask_index, delta_index, delta_rows, views, backend)
    scalars = Scalars(temperature, 0, hard_negative_weight, margin)
    total, log_sum_exp, positive, gradients, inverse = sum_with_gradients(
        *rows, scalars, (True, True, views == 3), backend
    )
    one = total.new_ones(())
    projected = [
        _projected(g, r, i, one, backend) for g, r, i in zip(gradients, rows, inverse, strict=True) if r is not None
    ]
    return total, log_sum_exp, positive, torch.cat(projected)


def _projected(gradient: Tensor, rows: Tensor, inverse: Tensor, one: Tensor, backend: str) -> Tensor:
    if backend == "triton":
        from fastprompt_kernels.rows_triton import project_rows

        return project_rows(gradient, rows, inverse, one, out=gradient)
    return project(gradient, rows.to(gradient.dtype), inverse, one)


def _rows_implementation(
    hidden_states: Tensor, mask_index: Tensor, delta_index: Tensor | None, delta_rows: Tensor | None, views: int,
    temperature: float, hard_negative_weight: float, margin: float, symmetric: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As ``info_nce``'s: (loss, log_sum_exp, positive) of the rows, (loss, log_sum_exp) of the columns."""
    rows = _views(hidden_states, mask_index, delta_index, delta_rows, views, backend)
    scalars = Scalars(temperature, 0, hard_negative_weight, margin)
    return rows_forward(*rows, scalars, symmetric, backend)


def _rows_gradient(
    row_upstream: Tensor, column_upstream: Tensor, hidden_states: Tensor, mask_index: Tensor,
    delta_index: Tensor | None, delta_rows: Tensor | None, loss: Tensor, log_sum_exp: Tensor, column_loss: Tensor,
    column_log_sum_exp: Tensor, views: int, temperature: float, hard_negative_weight: float, margin: float,
    backend: str,
) -> Tensor:  # fmt: skip
    """The gradient of the pooled rows, [V·B, H]; they are gathered once more."""
    rows = _views(hidden_states, mask_index, delta_index, delta_rows, views, backend)
    scalars = Scalars(temperature, 0, hard_negative_weight, margin)
    gradients = rows_backward(
        row_upstream, column_upstream, *rows, loss, log_sum_exp, column_loss, column_log_sum_exp,
        scalars, (True, True, views == 3), backend,
    )  # fmt: skip
    return torch.cat(gradients[:views])


_sum_op = torch.library.custom_op("fastprompt::prompt_info_nce_sum", _sum_implementation, mutates_args=())
_rows_op = torch.library.custom_op("fastprompt::prompt_info_nce_rows", _rows_implementation, mutates_args=())
_rows_gradient_op = torch.library.custom_op(
    "fastprompt::prompt_info_nce_rows_gradient", _rows_gradient, mutates_args=()
)


@_sum_op.register_fake
def _(hidden_states, mask_index, delta_index, delta_rows, views, *rest):  # type: ignore[no-untyped-def]
    dtype, count = torch.promote_types(hidden_states.dtype, torch.float32), len(mask_index) // views
    shapes = ((), (count,), (count,), (len(mask_index), hidden_states.shape[1]))
    return tuple(hidden_states.new_empty(shape, dtype=dtype) for shape in shapes)


@_rows_op.register_fake
def _(hidden_states, mask_index, delta_index, delta_rows, views, temperature, weight, margin, symmetric, backend):  # type: ignore[no-untyped-def]
    dtype, count = torch.promote_types(hidden_states.dtype, torch.float32), len(mask_index) // views
    return tuple(hidden_states.new_empty(n, dtype=dtype) for n in [count] * 3 + [count if symmetric else 0] * 2)


@_rows_gradient_op.register_fake
def _(row_upstream, column_upstream, hidden_states, mask_index, *rest):  # type: ignore[no-untyped-def]
    return hidden_states.new_empty(len(mask_index), hidden_states.shape[1])


def _remember(ctx: Any, inputs: tuple[Any, ...]) -> None:
    hidden_states, _, _, delta_rows, views = inputs[:5]
    ctx.sizes = (len(hidden_states), 0 if delta_rows is None else len(delta_rows), hidden_states.dtype)
    ctx.views, ctx.settings, ctx.backend = views, inputs[5:8], inputs[-1]


def _scatter(ctx: Any, gradient: Tensor, mask_index: Tensor, delta_index: Tensor | None, upstream: Any) -> Any:
    needs_hidden, needs_delta = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
    hidden, deltas = chosen(ctx, scatter_op, scatter_rows)(
        gradient, mask_index, delta_index if needs_delta else None, upstream, *ctx.sizes, needs_hidden, ctx.backend
    )
    return hidden if needs_hidden else None, None, None, deltas if needs_delta else None


def _sum_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _remember(ctx, inputs)
    ctx.save_for_backward(inputs[1], inputs[2], output[3])
    ctx.mark_non_differentiable(*output[1:])


def _sum_autograd(ctx: Any, upstream: Tensor, *_: Any) -> Any:
    mask_index, delta_index, gradient = ctx.saved_tensors
    return *_scatter(ctx, gradient, mask_index, delta_index, upstream), *[None] * 5


def _rows_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _remember(ctx, inputs)
    loss, log_sum_exp, positive, column_loss, column_log_sum_exp = output
    ctx.save_for_backward(*inputs[:4], loss, log_sum_exp, column_loss, column_log_sum_exp)
    ctx.mark_non_differentiable(log_sum_exp, positive, column_log_sum_exp)


def _rows_autograd(ctx: Any, row_upstream: Tensor, _: Any, __: Any, column_upstream: Tensor, ___: Any) -> Any:
    saved = ctx.saved_tensors
    gradient = chosen(ctx, _rows_gradient_op, _rows_gradient)(
        row_upstream.contiguous(), column_upstream.contiguous(), *saved, ctx.views, *ctx.settings, ctx.backend
    )
    return *_scatter(ctx, gradient, saved[1], saved[2], None), *[None] * 6


_sum = differentiable(_sum_op, _sum_implementation, _sum_setup, _sum_autograd)
_rows = differentiable(_rows_op, _rows_implementation, _rows_setup, _rows_autograd)
