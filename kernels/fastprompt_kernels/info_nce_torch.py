# SPDX-License-Identifier: Apache-2.0
"""InfoNCE in torch without a B × N matrix: row chunks, three products.

Once a chunk of rows has seen all columns, its softmax is final, so the gradient follows in the same visit: S = q̂
k̂ᵀ/τ, then dq̂ = G k̂/τ and dk̂ += Gᵀ q̂/τ with G = softmax − one-hot. A chunk that fits into the cache makes this
faster than the plain expression too, whose logits travel through memory several times.

Gradients leave this file "of the unit rows"; ``project`` takes them to the inputs.

bf16 rows on a CPU: float32 products of bf16 values may run on the bf16 units and still come out in float32 (oneDNN's
reduced "float32 precision"), four times as fast. The logits are made of the rows as they came, so they are exact;
only the gradient products round their operands.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

COSINE_EPS = 1e-8
"""A row with a norm up to this has no direction: its cosines are 0, and so is its gradient."""

CHUNK_BYTES = 16 * 2**20
"""Size of the one tile buffer."""

SAFE_EXPONENT = 40.0
"""exp(±40) and sums of it fit easily into float32: bounded logits need no maximum subtracted."""


@dataclass(frozen=True)
class Scalars:
    """What InfoNCE computes besides its tensors; see ``info_nce``."""

    temperature: float
    positive_offset: int
    hard_negative_weight: float
    margin: float


def softplus(x: Tensor) -> Tensor:
    """log(1 + eˣ) for any x; ``torch.nn.functional.softplus`` is x itself beyond 20, wrong by 2e-9."""
    return torch.logaddexp(x, x.new_zeros(()))


def inverse_norm(rows: Tensor) -> Tensor:
    """1/‖row‖, [N, 1], and 0 for a row without direction."""
    norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return norm.masked_fill_(norm <= COSINE_EPS, float("inf")).reciprocal_()


def project(unit_gradient: Tensor, rows: Tensor, inverse: Tensor, upstream: Tensor) -> Tensor:
    """Gradient of ``rows`` [N, D] from that of the unit rows: upstream · (I − x̂ x̂ᵀ) g / ‖x‖, in their dtype."""
    unit = rows.to(unit_gradient.dtype).contiguous() * inverse
    along = torch.linalg.vecdot(unit_gradient, unit).unsqueeze(1)
    return unit.mul_(-along).add_(unit_gradient).mul_(inverse * upstream).to(rows.dtype)


_precision_lock = threading.RLock()


@contextmanager
def product_precision(rows: Tensor) -> Iterator[None]:
    """float32 products in IEEE float32, whatever the process allows; on the bf16 units for bf16 rows on a CPU.

    The setting is the process's and is put back on leaving; float32 products of other threads would see it.
    """
    library: Any = torch.backends.mkldnn if rows.device.type == "cpu" else torch.backends.cuda
    library = library.matmul
    with _precision_lock:
        before = library.fp32_precision
        library.fp32_precision = "bf16" if rows.dtype == torch.bfloat16 and rows.device.type == "cpu" else "ieee"
        try:
            yield
        finally:
            library.fp32_precision = before


class Chunks:
    """The chunked logits of one call, and what follows from them."""

    def __init__(self, query: Tensor, key: Tensor, hard_negative: Tensor | None, scalars: Scalars) -> None:
        self.scalars = scalars
        dtype = torch.promote_types(query.dtype, torch.float32)
        rows = [t.to(dtype).contiguous() for t in (query, key, hard_negative) if t is not None]
        self.inverse = [inverse_norm(t) for t in rows]
        self.query, *self.columns = (t * i for t, i in zip(rows, self.inverse, strict=True))
        self.query.div_(scalars.temperature)
        # Operands of the logits: for bf16 the rows themselves, whose products are exact, to be scaled afterwards.
        self.exact = rows if query.dtype == torch.bfloat16 else None
        self.num_keys = len(key)
        self.num_columns = self.num_keys * len(self.columns)
        self.bounded = 1 / scalars.temperature + abs(scalars.hard_negative_weight) <= SAFE_EXPONENT
        rows_per_chunk = max(1, CHUNK_BYTES // (self.num_columns * self.query.element_size()))
        self.starts = range(0, len(query), min(rows_per_chunk, len(query)))
        self.buffer = self.query.new_empty(self.starts.step, self.num_columns)
        self.per_row = [self.query.new_empty(len(query)) for _ in range(3)]

    def part(self, chunk: Tensor, number: int) -> Tensor:
        """The columns of the keys (0) or of the hard negatives (1) in a chunk of logits."""
        return chunk[:, number * self.num_keys : (number + 1) * self.num_keys]

    def logits(self, start: int) -> tuple[slice, Tensor, Tensor]:
        """(rows, logits [c, columns], positive [c]) of a chunk; −inf stands where the positive was."""
        rows = slice(start, min(start + self.starts.step, len(self.query)))
        logits = self.buffer[: rows.stop - start]
        for number, columns in enumerate(self.columns):
            out = self.part(logits, number)
            if self.exact is None:
                torch.mm(self.query[rows], columns.T, out=out)
            else:
                torch.mm(self.exact[0][rows], self.exact[number + 1].T, out=out)
                out.mul_(self.inverse[0][rows] / self.scalars.temperature).mul_(self.inverse[number + 1].T)
        if len(self.columns) > 1 and self.scalars.hard_negative_weight:
            self.positive_slot(self.part(logits, 1), start).add_(self.scalars.hard_negative_weight)
        slot = self.positive_slot(logits, start)
        positive = slot - self.scalars.margin / self.scalars.temperature
        slot.fill_(float("-inf"))
        return rows, logits, positive

    def positive_slot(self, chunk: Tensor, start: int) -> Tensor:
        """View of the elements [i, start + i + positive_offset] of a chunk, [c]."""
        return chunk.diagonal(start + self.scalars.positive_offset)[: len(chunk)]

    def exponentials(self, rows: slice, logits: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
        """Turn ``logits`` into exp(logits − shift) in place and record the rows' results; (sum, shift)."""
        if self.bounded:
            shift = logits.new_zeros(1, 1)
        else:
            shift = logits.amax(1, keepdim=True)
            shift.masked_fill_(shift == float("-inf"), 0.0)
            logits.sub_(shift)
        total = logits.exp_().sum(1, keepdim=True)
        negatives = (total.log() + shift).squeeze(1)
        loss, log_sum_exp, kept = self.per_row
        # The positive stays out of the sum: log-softmax loses the gradient of an almost certain one (p − 1).
        torch.sub(negatives, positive, out=loss[rows])
        loss[rows] = softplus(loss[rows])
        torch.logaddexp(negatives, positive, out=log_sum_exp[rows])
        kept[rows] = positive
        return total, shift


def rows_forward(
    query: Tensor, key: Tensor, hard_negative: Tensor | None, scalars: Scalars, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, log_sum_exp, positive) of the rows, [B] each, and (loss, log_sum_exp) of the columns, [N] or [0]."""
    chunks = Chunks(query, key, hard_negative, scalars)
    columns = chunks.num_columns if symmetric else 0
    highest, total = chunks.query.new_full((columns,), float("-inf")), chunks.query.new_zeros(columns)
    with product_precision(query):
        for start in chunks.starts:
            rows, logits, positive = chunks.logits(start)
            if symmetric:
                higher = torch.maximum(highest, logits.amax(0))
                finite = higher.masked_fill(higher == float("-inf"), 0.0)
                total.mul_((highest - finite).exp_()).add_((logits - finite).exp_().sum(0))
                highest = higher
            chunks.exponentials(rows, logits, positive)
    loss, log_sum_exp, positive = chunks.per_row
    if not symmetric:
        return loss, log_sum_exp, positive, total, total.clone()
    negatives = total.log() + highest.masked_fill(highest == float("-inf"), 0.0)
    return loss, log_sum_exp, positive, softplus(negatives - positive), torch.logaddexp(negatives, positive)


def sum_with_gradients(
    query: Tensor, key: Tensor, hard_negative: Tensor | None, scalars: Scalars, needs: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    """(summed loss, log_sum_exp, positive, unit-row gradients, inverse norms) with three products in all."""
    chunks = Chunks(query, key, hard_negative, scalars)
    gradients = _Gradients(chunks, needs)
    with product_precision(query):
        for start in chunks.starts:
            rows, weights, positive = chunks.logits(start)
            total, shift = chunks.exponentials(rows, weights, positive)
            # weights · exp(shift − lse) is the softmax; the factor rides on the thin operands instead.
            chunks.positive_slot(weights, start).copy_(-total.squeeze(1))
            factor = (shift - chunks.per_row[1][rows].unsqueeze(1)).clamp_(max=80.0)  # beyond only without negatives
            gradients.add(rows, weights, factor.exp_())
    loss, log_sum_exp, positive = chunks.per_row
    return loss.sum(), log_sum_exp, positive, gradients.tensors, gradients.inverse


def rows_backward(
    row_upstream: Tensor, column_upstream: Tensor, query: Tensor, key: Tensor, hard_negative: Tensor | None,
    loss: Tensor, log_sum_exp: Tensor, column_loss: Tensor, column_log_sum_exp: Tensor,
    scalars: Scalars, needs: tuple[bool, bool, bool],
) -> list[Tensor]:  # fmt: skip
    """Gradients of query, key and hard negatives for any upstream gradient of the rows' and columns' losses."""
    chunks = Chunks(query, key, hard_negative, scalars)
    gradients = _Gradients(chunks, needs)
    symmetric = len(column_loss) > 0
    with product_precision(query):
        for start in chunks.starts:
            rows, logits, _ = chunks.logits(start)
            certainty = torch.expm1(-loss[rows])  # −(1 − p) without cancellation
            if symmetric:
                weights = (logits - log_sum_exp[rows].unsqueeze(1)).exp_().mul_(row_upstream[rows].unsqueeze(1))
                weights.add_(logits.sub_(column_log_sum_exp).exp_().mul_(column_upstream))
                # symmetric: positive_offset is 0, so a row's positive has the row's number
                certainty = certainty * row_upstream[rows] + torch.expm1(-column_loss[rows]) * column_upstream[rows]
                factor = logits.new_ones(1, 1)
            else:
                weights = logits.sub_(log_sum_exp[rows].unsqueeze(1)).exp_()
                factor = row_upstream[rows].unsqueeze(1)
            chunks.positive_slot(weights, start).copy_(certainty)
            gradients.add(rows, weights, factor)
    one = row_upstream.new_ones(())
    return [
        project(unit, rows, inverse, one) if rows is not None and len(inverse) else query.new_empty(0)
        for unit, rows, inverse in zip(gradients.tensors, (query, key, hard_negative), gradients.inverse, strict=True)
    ]


class _Gradients:
    """Accumulates the unit-row gradients of query, keys and hard negatives over chunks.

    ``tensors`` and ``inverse`` (norms) are [0] where not needed.
    """

    def __init__(self, chunks: Chunks, needs: tuple[bool, bool, bool]) -> None:
        self.chunks = chunks
        empty = chunks.query.new_empty
        self.tensors, self.inverse = [], []
        for number, needed in enumerate(needs):
            present = needed and number <= len(chunks.columns)
            unit = [chunks.query, *chunks.columns][number] if present else empty(0)
            self.tensors.append(torch.empty_like(unit))
            self.inverse.append(chunks.inverse[number] if present else empty(0))

    def add(self, rows: slice, weights: Tensor, factor: Tensor) -> None:
        """Add the products of G = factor · weights, [c, columns]."""
        chunks = self.chunks
        if len(self.tensors[0]):
            target = torch.mm(chunks.part(weights, 0), chunks.columns[0], out=self.tensors[0][rows])
            for number, columns in enumerate(chunks.columns[1:], start=1):
                target.addmm_(chunks.part(weights, number), columns)
            target.mul_(factor / chunks.scalars.temperature)
        scaled = chunks.query[rows].mul_(factor)  # in place: these rows are done
        for number, target in enumerate(self.tensors[1:]):
            if len(target):
                beta = float(rows.start > 0)  # 0 ignores what is there
                torch.addmm(target, chunks.part(weights, number).T, scaled, beta=beta, out=target)
