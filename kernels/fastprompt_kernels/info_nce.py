# SPDX-License-Identifier: Apache-2.0
"""InfoNCE over cosine similarities, with hard negatives, a margin, and a positive offset for global batches.

    s_ij = cos(query_i, key_j)/τ − 1[j = p_i]·m/τ,    t_ij = cos(query_i, hard_negative_j)/τ + w·1[j = p_i]
    loss_i = logsumexp_j(s_ij ∪ t_ij) − s_i,p_i,      p_i = i + positive_offset

Computed as softplus(logsumexp of all but the positive − positive), which keeps the gradient of an almost certain
positive.

Source: SimCSE (Gao et al., 2021), equations 1 and 5; w is the published code's ``hard_negative_weight`` (a logit); m
is the additive margin of AM-Softmax (Wang et al., 2018), equation 6; the symmetric loss is CLIP's (Radford et al.,
2021), figure 3.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastprompt_kernels import info_nce_torch
from fastprompt_kernels.dispatch import check_tensors, choose_backend
from fastprompt_kernels.info_nce_torch import COSINE_EPS, Scalars, project, softplus
from fastprompt_kernels.operators import chosen, differentiable


class InfoNCEOutput(NamedTuple):
    """``loss``: scalar, or [B] with ``reduction="none"``; ``log_sum_exp`` and ``positive_logit``: [B], detached."""

    loss: Tensor
    log_sum_exp: Tensor
    positive_logit: Tensor


def info_nce(
    query: Tensor,
    key: Tensor,
    *,
    temperature: float,
    positive_offset: int = 0,
    hard_negative: Tensor | None = None,
    hard_negative_weight: float = 0.0,
    margin: float = 0.0,
    symmetric: bool = False,
    reduction: str = "mean",
    backend: str | None = None,
) -> InfoNCEOutput:
    """Contrast each query with every key; key ``i + positive_offset`` is query i's positive.

    The B × N logits are never stored: memory is O((B + N)·D) plus one bounded tile buffer. With "mean" and "sum" the
    gradient is computed along with the loss, from three matrix products; with "none" and ``symmetric`` the logits are
    computed once more in the backward. All results are computed in float32 (float64 for float64), under autocast too;
    products of float32 rows are IEEE float32, never TF32, of fp16 and bf16 rows exact.
    A row of norm ≤ 1e-8 has no direction: cosine 0, gradient 0.

    Args:
        query: [B, D], any float dtype; need not be normalised.
        key: [N, D], N ≥ B + positive_offset.
        temperature: τ > 0.
        positive_offset: the row of ``key`` that belongs to ``query[0]``: this rank's first row in the global batch.
        hard_negative: [N, D] or None; more columns for every query.
        hard_negative_weight: added to the logit of a query's own hard negative.
        margin: m ≥ 0, subtracted from the positive's cosine.
        symmetric: average with the loss of the other direction (each key against every query), for B = N without
            hard negatives. ``log_sum_exp`` stays that of the queries.
        reduction: "mean", "sum" or "none".
        backend: see ``fastprompt_kernels.dispatch``; None for the default.

    Returns:
        InfoNCEOutput, float32 (float64 for float64 input); gradients to ``query``, ``key``, ``hard_negative``.
        ``positive_logit`` contains the margin, so that loss_i = log_sum_exp_i − positive_logit_i.

    Raises:
        ValueError: shapes, dtypes, devices or settings that do not fit, or a backend that cannot serve the call.
    """
    scalars = Scalars(temperature, positive_offset, hard_negative_weight, margin)
    check_info_nce(query, key, hard_negative, scalars, symmetric, reduction)
    kind = choose_backend("info_nce", backend, query)
    if kind == "reference":
        return info_nce_reference(
            query, key, temperature=temperature, positive_offset=positive_offset, hard_negative=hard_negative,
            hard_negative_weight=hard_negative_weight, margin=margin, symmetric=symmetric, reduction=reduction,
        )  # fmt: skip
    settings = (temperature, positive_offset, hard_negative_weight, margin)
    inputs = (query, key, hard_negative)
    needs = [t is not None and t.requires_grad for t in inputs]
    if reduction != "none" and not symmetric and torch.is_grad_enabled() and any(needs):
        total, log_sum_exp, positive, *_ = _sum_with_gradients(*inputs, *settings, *needs, kind)
        loss = total / len(query) if reduction == "mean" else total
        return InfoNCEOutput(loss, log_sum_exp, positive)
    row_loss, log_sum_exp, positive, column_loss, _ = _rows(*inputs, *settings, symmetric, kind)
    if symmetric:
        row_loss = (row_loss + column_loss) / 2
    return InfoNCEOutput(reduce(row_loss, reduction), log_sum_exp, positive)


def info_nce_reference(
    query: Tensor,
    key: Tensor,
    *,
    temperature: float,
    positive_offset: int = 0,
    hard_negative: Tensor | None = None,
    hard_negative_weight: float = 0.0,
    margin: float = 0.0,
    symmetric: bool = False,
    reduction: str = "mean",
) -> InfoNCEOutput:
    """``info_nce`` as plain torch, B × N logits and autograd's own backward: the oracle."""
    with torch.autocast(query.device.type, enabled=False):
        dtype = torch.promote_types(query.dtype, torch.float32)
        query_hat, key_hat = _unit(query.to(dtype)), _unit(key.to(dtype))
        column = torch.arange(len(query), device=query.device).unsqueeze(1) + positive_offset
        cosine = query_hat @ key_hat.T
        positive = ((cosine.gather(1, column) - margin) / temperature).squeeze(1)
        logits = (cosine / temperature).scatter(1, column, float("-inf"))
        columns = logits.logsumexp(0)
        if hard_negative is not None:
            extra = query_hat @ _unit(hard_negative.to(dtype)).T / temperature
            own = torch.full_like(positive, hard_negative_weight).unsqueeze(1)
            logits = torch.cat([logits, extra.scatter_add(1, column, own)], dim=1)
        negatives = logits.logsumexp(1)
        row_loss = softplus(negatives - positive)
        if symmetric:
            row_loss = (row_loss + softplus(columns - positive)) / 2
        log_sum_exp = torch.logaddexp(negatives, positive).detach()
    return InfoNCEOutput(reduce(row_loss, reduction), log_sum_exp, positive.detach())


def _unit(rows: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    # Both branches of where are differentiated: keep 0/0 out of the one not taken.
    safe = torch.where(norm > COSINE_EPS, norm, 1.0)
    return torch.where(norm > COSINE_EPS, rows / safe, 0.0)


def reduce(row_loss: Tensor, reduction: str) -> Tensor:
    """Mean, sum, or the rows themselves."""
    return row_loss if reduction == "none" else row_loss.sum() if reduction == "sum" else row_loss.mean()


# The operators behind the public function. They are opaque to torch.compile, which sees shapes only.


def rows_forward(
    query: Tensor, key: Tensor, hard_negative: Tensor | None, scalars: Scalars, symmetric: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, log_sum_exp, positive) of the rows, [B] each, and (loss, log_sum_exp) of the columns, [N] or [0]."""
    return _implementation(backend).rows_forward(query, key, hard_negative, scalars, symmetric)


def rows_backward(*arguments: Any) -> list[Tensor]:
    """Gradients of query, key and hard negatives for any upstream; the last argument is the backend."""
    return _implementation(arguments[-1]).rows_backward(*arguments[:-1])


def sum_with_gradients(
    query: Tensor, key: Tensor, hard_negative: Tensor | None, scalars: Scalars, needs: tuple[bool, bool, bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:  # fmt: skip
    """(summed loss, log_sum_exp, positive, unit-row gradients, inverse norms)."""
    return _implementation(backend).sum_with_gradients(query, key, hard_negative, scalars, needs)


def _implementation(backend: str) -> Any:
    if backend == "torch":
        return info_nce_torch
    from fastprompt_kernels import info_nce_triton

    return info_nce_triton


def _rows_implementation(
    query: Tensor, key: Tensor, hard_negative: Tensor | None, temperature: float, positive_offset: int,
    hard_negative_weight: float, margin: float, symmetric: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, log_sum_exp, positive) of the rows and (loss, log_sum_exp) of the columns, [0] unless symmetric."""
    scalars = Scalars(temperature, positive_offset, hard_negative_weight, margin)
    return rows_forward(query, key, hard_negative, scalars, symmetric, backend)


_rows_op = torch.library.custom_op("fastprompt::info_nce_rows", _rows_implementation, mutates_args=())


@_rows_op.register_fake
def _(query, key, hard_negative, temperature, offset, weight, margin, symmetric, backend):  # type: ignore[no-untyped-def]
    dtype = torch.promote_types(query.dtype, torch.float32)
    sizes = [len(query)] * 3 + [len(key) if symmetric else 0] * 2
    return tuple(query.new_empty(size, dtype=dtype) for size in sizes)


def _rows_backward(
    row_upstream: Tensor, column_upstream: Tensor, query: Tensor, key: Tensor, hard_negative: Tensor | None,
    loss: Tensor, log_sum_exp: Tensor, column_loss: Tensor, column_log_sum_exp: Tensor,
    temperature: float, positive_offset: int, hard_negative_weight: float, margin: float,
    needs_query: bool, needs_key: bool, needs_hard_negative: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the three inputs; [0] where not needed."""
    scalars = Scalars(temperature, positive_offset, hard_negative_weight, margin)
    gradients = rows_backward(
        row_upstream, column_upstream, query, key, hard_negative, loss, log_sum_exp, column_loss, column_log_sum_exp,
        scalars, (needs_query, needs_key, needs_hard_negative), backend,
    )  # fmt: skip
    query_gradient, key_gradient, hard_gradient = gradients
    return query_gradient, key_gradient, hard_gradient


_rows_backward_op = torch.library.custom_op("fastprompt::info_nce_rows_backward", _rows_backward, mutates_args=())


@_rows_backward_op.register_fake
def _(row_upstream, column_upstream, query, key, hard_negative, *rest):  # type: ignore[no-untyped-def]
    needs = rest[8:11]
    return tuple(
        torch.empty_like(t, memory_format=torch.contiguous_format) if t is not None and needed else query.new_empty(0)
        for t, needed in zip((query, key, hard_negative), needs, strict=True)
    )


def _rows_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, temperature, offset, weight, margin, _, backend = inputs
    loss, log_sum_exp, positive, column_loss, column_log_sum_exp = output
    ctx.save_for_backward(*tensors, loss, log_sum_exp, column_loss, column_log_sum_exp)
    ctx.mark_non_differentiable(log_sum_exp, positive, column_log_sum_exp)
    ctx.settings, ctx.backend = (temperature, offset, weight, margin), backend


def _rows_autograd(ctx: Any, row_upstream: Tensor, _: Any, __: Any, column_upstream: Tensor, ___: Any) -> Any:
    needs = ctx.needs_input_grad[:3]
    gradients = chosen(ctx, _rows_backward_op, _rows_backward)(
        row_upstream.contiguous(),
        column_upstream.contiguous(),
        *ctx.saved_tensors,
        *ctx.settings,
        *needs,
        ctx.backend,
    )
    return *(g if needed else None for g, needed in zip(gradients, needs, strict=True)), *[None] * 6


_rows = differentiable(_rows_op, _rows_implementation, _rows_setup, _rows_autograd)


def _sum_implementation(
    query: Tensor, key: Tensor, hard_negative: Tensor | None, temperature: float, positive_offset: int,
    hard_negative_weight: float, margin: float,
    needs_query: bool, needs_key: bool, needs_hard_negative: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(summed loss, log_sum_exp, positive), three unit-row gradients, three inverse norms ([0]: not needed)."""
    scalars = Scalars(temperature, positive_offset, hard_negative_weight, margin)
    needs = (needs_query, needs_key, needs_hard_negative)
    total, log_sum_exp, positive, (g1, g2, g3), (n1, n2, n3) = sum_with_gradients(
        query, key, hard_negative, scalars, needs, backend
    )
    return total, log_sum_exp, positive, g1, g2, g3, n1, n2, n3


_sum_op = torch.library.custom_op("fastprompt::info_nce_sum", _sum_implementation, mutates_args=())


@_sum_op.register_fake
def _(query, key, hard_negative, *rest):  # type: ignore[no-untyped-def]
    dtype = torch.promote_types(query.dtype, torch.float32)
    wanted = [t if n else None for t, n in zip((query, key, hard_negative), rest[4:7], strict=True)]
    return (
        query.new_empty((), dtype=dtype),
        *(query.new_empty(len(query), dtype=dtype) for _ in range(2)),
        *(query.new_empty(0 if t is None else t.shape, dtype=dtype) for t in wanted),
        *(query.new_empty(0 if t is None else (len(t), 1), dtype=dtype) for t in wanted),
    )


def _project(unit_gradient: Tensor, rows: Tensor, inverse: Tensor, upstream: Tensor, backend: str) -> Tensor:
    if backend == "torch":
        return project(unit_gradient, rows, inverse, upstream)
    from fastprompt_kernels.rows_triton import project_rows

    return project_rows(unit_gradient, rows, inverse, upstream)


_project_op = torch.library.custom_op("fastprompt::project_rows", _project, mutates_args=())


@_project_op.register_fake
def _(unit_gradient, rows, inverse, upstream, backend):  # type: ignore[no-untyped-def]
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


def _sum_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, needs, ctx.backend = inputs[:3], inputs[7:10], inputs[10]
    ctx.save_for_backward(*(t if needed else None for t, needed in zip(tensors, needs, strict=True)), *output[3:])
    ctx.mark_non_differentiable(*output[1:])


def _sum_autograd(ctx: Any, upstream: Tensor, *_: Any) -> Any:
    saved, project_rows = ctx.saved_tensors, chosen(ctx, _project_op, _project)
    gradients = [
        None if rows is None else project_rows(unit, rows, inverse, upstream, ctx.backend)
        for rows, unit, inverse in zip(saved[:3], saved[3:6], saved[6:9], strict=True)
    ]
    return *gradients, *[None] * 8


_sum_with_gradients = differentiable(_sum_op, _sum_implementation, _sum_setup, _sum_autograd)


def check_info_nce(
    query: Tensor, key: Tensor, hard_negative: Tensor | None, scalars: Scalars, symmetric: bool, reduction: str
) -> None:
    """Raise the ValueErrors of ``info_nce``."""
    if query.ndim != 2 or key.ndim != 2 or query.shape[1] != key.shape[1] or query.shape[1] == 0:
        raise ValueError(
            f"info_nce wants query [B, D] and key [N, D], got {tuple(query.shape)} and {tuple(key.shape)}"
        )
    check_tensors("info_nce", query=query, key=key, hard_negative=hard_negative)
    if query.shape[0] == 0:
        raise ValueError("info_nce wants at least one query")
    if hard_negative is not None and hard_negative.shape != key.shape:
        raise ValueError(
            f"info_nce wants as many hard negatives as keys: {tuple(hard_negative.shape)} for {tuple(key.shape)}"
        )
    check_info_nce_settings("info_nce", scalars, reduction)
    if scalars.positive_offset < 0 or scalars.positive_offset + query.shape[0] > key.shape[0]:
        raise ValueError(
            f"info_nce: {query.shape[0]} queries from positive_offset {scalars.positive_offset} on do not fit into "
            f"{key.shape[0]} keys"
        )
    if symmetric and (query.shape != key.shape or hard_negative is not None):
        raise ValueError(
            f"info_nce: the symmetric loss wants as many queries as keys and no hard negatives, got {len(query)} "
            f"queries, {len(key)} keys{'' if hard_negative is None else ' and hard negatives'}"
        )


def check_info_nce_settings(op: str, scalars: Scalars, reduction: str) -> None:
    """Raise the ValueErrors about settings alone."""
    if not 0 < scalars.temperature < float("inf"):
        raise ValueError(f"{op} wants temperature > 0, got {scalars.temperature}")
    if not 0 <= scalars.margin < float("inf"):
        raise ValueError(f"{op} wants margin ≥ 0, got {scalars.margin}")
    if not abs(scalars.hard_negative_weight) < float("inf"):
        raise ValueError(f"{op} wants a finite hard_negative_weight, got {scalars.hard_negative_weight}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'{op} knows reduction "mean", "sum" and "none", not {reduction!r}')
