# SPDX-License-Identifier: Apache-2.0
"""InfoNCE over cosine similarities, with hard negatives and a positive offset for global batches.

    s_ij = cos(query_i, key_j) / τ,     t_ij = cos(query_i, hard_negative_j) / τ + w·1[j = p_i],     p_i = i + offset
    loss_i = logsumexp_j(s_ij ∪ t_ij) − s_i,p_i

Source: SimCSE (Gao et al., 2021), equations 1 and 5; w is the published code's ``hard_negative_weight`` (a logit).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

COSINE_EPS = 1e-8
"""Lower bound of a row's norm, as in ``torch.nn.functional.cosine_similarity``: a zero row has cosine 0, not NaN."""


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
    reduction: str = "mean",
) -> InfoNCEOutput:
    """Contrast each query with every key; key ``i + positive_offset`` is query i's positive.

    Args:
        query: [B, D], any float dtype; need not be normalised.
        key: [N, D], N ≥ B + positive_offset.
        temperature: τ > 0.
        positive_offset: the row of ``key`` that belongs to ``query[0]``: this rank's first row in the global batch.
        hard_negative: [N, D] or None; more columns for every query.
        hard_negative_weight: added to the logit of a query's own hard negative.
        reduction: "mean", "sum" or "none".

    Returns:
        InfoNCEOutput, float32 (float64 for float64 input); gradients to ``query``, ``key``, ``hard_negative``.

    Raises:
        ValueError: shapes, temperature, offset or reduction that make no sense.
    """
    _check(query, key, temperature, positive_offset, hard_negative, reduction)
    # Logits are cosines × 1/τ: in bf16 at 1/τ = 20 they would err by 0.08. Autocast must not undo this.
    with torch.autocast(query.device.type, enabled=False):
        dtype = torch.promote_types(query.dtype, torch.float32)
        query_hat = F.normalize(query.to(dtype), dim=-1, eps=COSINE_EPS)
        key_hat = F.normalize(key.to(dtype), dim=-1, eps=COSINE_EPS)
        positive_column = torch.arange(query.shape[0], device=query.device).unsqueeze(1) + positive_offset
        logits = query_hat @ key_hat.T / temperature
        positive = logits.gather(1, positive_column)
        # The positive stays out of the sum: softplus(lse_neg − positive) keeps the gradient of an almost certain
        # positive, which log-softmax loses to cancellation (p − 1 in float32).
        logits = logits.scatter(1, positive_column, float("-inf"))
        if hard_negative is not None:
            negative_hat = F.normalize(hard_negative.to(dtype), dim=-1, eps=COSINE_EPS)
            extra = query_hat @ negative_hat.T / temperature
            if hard_negative_weight:
                own = torch.full_like(positive, hard_negative_weight)
                extra = extra.scatter_add(1, positive_column, own)
            logits = torch.cat([logits, extra], dim=1)
        negatives = torch.logsumexp(logits, dim=1)
        positive = positive.squeeze(1)
        row_loss = F.softplus(negatives - positive)
        log_sum_exp = torch.logaddexp(negatives.detach(), positive.detach())
    loss = row_loss if reduction == "none" else row_loss.sum() if reduction == "sum" else row_loss.mean()
    return InfoNCEOutput(loss, log_sum_exp, positive.detach())


def _check(
    query: Tensor,
    key: Tensor,
    temperature: float,
    positive_offset: int,
    hard_negative: Tensor | None,
    reduction: str,
) -> None:
    if query.ndim != 2 or key.ndim != 2 or query.shape[1] != key.shape[1]:
        raise ValueError(
            f"info_nce wants query [B, D] and key [N, D], got {tuple(query.shape)} and {tuple(key.shape)}"
        )
    if query.shape[0] == 0:
        raise ValueError("info_nce wants at least one query")
    if hard_negative is not None and hard_negative.shape != key.shape:
        raise ValueError(
            f"info_nce wants as many hard negatives as keys: {tuple(hard_negative.shape)} for {tuple(key.shape)}"
        )
    if not temperature > 0:
        raise ValueError(f"info_nce wants temperature > 0, got {temperature}")
    if positive_offset < 0 or positive_offset + query.shape[0] > key.shape[0]:
        raise ValueError(
            f"info_nce: {query.shape[0]} queries from positive_offset {positive_offset} on do not fit into "
            f"{key.shape[0]} keys"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'info_nce knows reduction "mean", "sum" and "none", not {reduction!r}')
