# SPDX-License-Identifier: Apache-2.0
"""Gather of the [MASK] rows, minus the template's bias.

    out[i] = hidden_states[mask_index[i]] − delta_rows[delta_index[i]]

Backward: ∂hidden_states[r] = Σ over {i : mask_index[i] = r} of ∂out[i], ∂delta_rows[k] = −Σ over {i : delta_index[i]
= k}.

Source: PromptBERT (Jiang et al., 2022), section 4.3, template denoising: ĥ_i = h_i − ĥ_template(n_i).
"""

from typing import Any

import torch
from torch import Tensor

from fastprompt_kernels.dispatch import check_index, check_range, check_tensors, choose_backend
from fastprompt_kernels.operators import chosen, differentiable


def mask_delta_pool(
    hidden_states: Tensor,
    mask_index: Tensor,
    delta_index: Tensor | None = None,
    delta_rows: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Pick one row of ``hidden_states`` a sentence and subtract the delta of its (template, length).

    The backward is deterministic: gradient rows are summed in the order of the sentences, the deltas' in float32.

    Args:
        hidden_states: [T, H], float; the last hidden states of all tokens.
        mask_index: [N], int64; the row of each sentence's [MASK].
        delta_index: [N], int64, or None for no subtraction; which delta belongs to each sentence.
        delta_rows: [K, H], float, or None exactly when ``delta_index`` is.
        backend: see ``fastprompt_kernels.dispatch``; None for the default.

    Returns:
        [N, H] in the dtype of ``hidden_states``. Gradients flow to ``hidden_states`` (zero in rows that no
        sentence picks) and to ``delta_rows`` (minus the sum over the sentences that share the delta).

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; only one of ``delta_index`` and ``delta_rows``.
        IndexError: an index out of range (on CPU; on a GPU the kernel asserts under ``TRITON_DEBUG=1``).
    """
    check_pool("mask_delta_pool", hidden_states, mask_index, delta_index, delta_rows, "[N]", 1)
    kind = choose_backend("mask_delta_pool", backend, hidden_states)
    if kind == "reference":
        return mask_delta_pool_reference(hidden_states, mask_index, delta_index, delta_rows)
    pooled: Tensor = _pool(hidden_states, mask_index, delta_index, delta_rows, kind)
    return pooled


def mask_delta_pool_reference(
    hidden_states: Tensor, mask_index: Tensor, delta_index: Tensor | None = None, delta_rows: Tensor | None = None
) -> Tensor:
    """``mask_delta_pool`` as plain indexing: the oracle."""
    rows = hidden_states[mask_index]
    return rows if delta_rows is None else rows - delta_rows[delta_index]


def check_pool(
    op: str, hidden_states: Tensor, mask_index: Tensor, delta_index: Tensor | None, delta_rows: Tensor | None,
    index_shape: str, index_ndim: int,
) -> None:  # fmt: skip
    """Raise the ValueErrors of ``mask_delta_pool``."""
    if hidden_states.ndim != 2 or mask_index.ndim != index_ndim:
        raise ValueError(
            f"{op} wants hidden_states [T, H] and mask_index {index_shape}, "
            f"got {tuple(hidden_states.shape)} and {tuple(mask_index.shape)}"
        )
    check_index(op, "mask_index", mask_index, hidden_states)
    check_tensors(op, hidden_states=hidden_states, delta_rows=delta_rows)
    if delta_index is None and delta_rows is None:
        return
    if delta_index is None or delta_rows is None:
        raise ValueError(f"{op} wants delta_index and delta_rows together, or neither")
    check_index(op, "delta_index", delta_index, hidden_states)
    if delta_index.shape != mask_index.shape:
        raise ValueError(
            f"{op} wants one delta_index a sentence: {tuple(delta_index.shape)} for {tuple(mask_index.shape)}"
        )
    if delta_rows.ndim != 2 or delta_rows.shape[1] != hidden_states.shape[1]:
        raise ValueError(f"{op} wants delta_rows [K, {hidden_states.shape[1]}], got {tuple(delta_rows.shape)}")


def pool_rows(
    hidden_states: Tensor, mask_index: Tensor, delta_index: Tensor | None, delta_rows: Tensor | None, backend: str
) -> Tensor:
    """The forward, [N, H]."""
    check_range("mask_delta_pool", "mask_index", mask_index, len(hidden_states))
    if delta_index is not None and delta_rows is not None:
        check_range("mask_delta_pool", "delta_index", delta_index, len(delta_rows))
    if backend == "triton":
        from fastprompt_kernels import rows_triton

        return rows_triton.prepare_rows(hidden_states, mask_index, delta_index, delta_rows, pooled=True)[0]
    rows = hidden_states.index_select(0, mask_index)
    if delta_index is not None and delta_rows is not None:
        rows.sub_(delta_rows.index_select(0, delta_index))
    return rows


def scatter_rows(
    gradient: Tensor, mask_index: Tensor, delta_index: Tensor | None, upstream: Tensor | None,
    num_rows: int, num_deltas: int, dtype: torch.dtype, needs_hidden: bool, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The backward: (∂hidden_states [T, H] or [0], ∂delta_rows [K, H] or [0]) of ``upstream`` · ``gradient``."""

    def gathered(index: Tensor, size: int, sign: float) -> Tensor:
        if backend == "triton":
            from fastprompt_kernels import rows_triton

            return rows_triton.segment_sum(gradient, index, size, sign, upstream, dtype)
        wide = torch.promote_types(gradient.dtype, torch.float32)
        scaled = gradient * sign if upstream is None else gradient * (upstream * sign)
        # Hidden states' rows are hardly ever picked twice; many sentences share a delta.
        total = gradient.new_zeros(size, gradient.shape[1], dtype=dtype if sign > 0 else wide)
        scaled = scaled.to(total.dtype)
        if index.device.type == "cpu":
            return total.index_add_(0, index, scaled).to(dtype)
        # Of the two, this one is deterministic on a GPU.
        return total.index_put_((index,), scaled, accumulate=True).to(dtype)

    none = gradient.new_empty(0, dtype=dtype)
    hidden = gathered(mask_index, num_rows, 1.0) if needs_hidden else none
    return hidden, none.clone() if delta_index is None else gathered(delta_index, num_deltas, -1.0)


_pool_op = torch.library.custom_op("fastprompt::mask_delta_pool", pool_rows, mutates_args=())
scatter_op = torch.library.custom_op("fastprompt::scatter_rows", scatter_rows, mutates_args=())


@_pool_op.register_fake
def _(hidden_states, mask_index, delta_index, delta_rows, backend):  # type: ignore[no-untyped-def]
    return hidden_states.new_empty(len(mask_index), hidden_states.shape[1])


@scatter_op.register_fake
def _(gradient, mask_index, delta_index, upstream, rows, deltas, dtype, needs, backend):  # type: ignore[no-untyped-def]
    width = gradient.shape[1]
    return (
        gradient.new_empty((rows, width) if needs else (0,), dtype=dtype),
        gradient.new_empty((0,) if delta_index is None else (deltas, width), dtype=dtype),
    )


def _pool_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden_states, mask_index, delta_index, delta_rows, ctx.backend = inputs
    ctx.save_for_backward(mask_index, delta_index)
    ctx.sizes = (len(hidden_states), 0 if delta_rows is None else len(delta_rows), hidden_states.dtype)


def _pool_autograd(ctx: Any, upstream: Tensor) -> Any:
    mask_index, delta_index = ctx.saved_tensors
    needs_hidden, needs_delta = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
    hidden, deltas = chosen(ctx, scatter_op, scatter_rows)(
        upstream, mask_index, delta_index if needs_delta else None, None, *ctx.sizes, needs_hidden, ctx.backend
    )
    return hidden if needs_hidden else None, None, None, deltas if needs_delta else None, None


_pool = differentiable(_pool_op, pool_rows, _pool_setup, _pool_autograd)
