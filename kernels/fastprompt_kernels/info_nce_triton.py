# SPDX-License-Identifier: Apache-2.0
"""InfoNCE in Triton: row chunks, three products, float32 logits in one bounded tile buffer.

For each chunk of rows:
    S = q kᵀ · 1/(‖q‖‖k‖τ)            products of the rows as they came; each tile's maximum and sum of exponentials
    lse, loss                          from the tiles' partial results
    G = softmax − one-hot              float32, or float16 scaled by 2¹⁴ for 16-bit rows
    dq̂ = G k̂/τ,   dk̂ += Gᵀ q̂/τ      with unit rows in float16 for 16-bit rows: 8 times finer than bf16 in [−1, 1]

Exponents are base 2 on the device: logits are stored times log₂e. Nothing is summed with atomics.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastprompt_kernels.info_nce_torch import Scalars
from fastprompt_kernels.launcher import Tile, launch, product_tile
from fastprompt_kernels.rows_triton import prepare_rows, project_rows

TILE_BUFFER_BYTES = 512 * 2**20
"""Bound of the logits and their gradient together, but for ``MIN_CHUNK`` rows."""

MIN_CHUNK = 128
"""Rows that are always taken together: fewer would leave a product's tile empty."""

GRADIENT_SCALE = 2.0**14
"""Keeps a 16-bit softmax in float16's normal range down to 4e-9; |G| ≤ 1, and float16 reaches 2¹⁶."""

TARGET_PROGRAMS = 264
"""Two waves of an H100: the sum over columns is split until there are this many programs."""

LOG2_E = 1.4426950408889634


@triton.jit
def _swizzle(rows_of_tiles, columns_of_tiles, GROUP: tl.constexpr):
    """Tile (m, n) of a linear program id such that programs that run together share rows in the L2 cache."""
    program = tl.program_id(0)
    width = GROUP * columns_of_tiles
    group = program // width
    size = tl.minimum(rows_of_tiles - group * GROUP, GROUP)
    return group * GROUP + (program % width) % size, (program % width) // size


@triton.jit
def _info_nce_logits_fwd_kernel(
    query_ptr, key_ptr, query_inverse_ptr, key_inverse_ptr,
    logits_ptr, row_max_ptr, row_sum_ptr, column_max_ptr, column_sum_ptr, positive_ptr,
    num_rows, num_columns, width, positive_shift,
    query_stride, key_stride, logits_stride, row_partial_stride, column_partial_stride,
    scale, margin, own_bonus,
    IS_KEY: tl.constexpr, STORE_LOGITS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = _swizzle(tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, BLOCK_N), 8)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_m, inside_n = m < num_rows, n < num_columns
    k = tl.arange(0, BLOCK_K)
    query_block = query_ptr + m.to(tl.int64)[:, None] * query_stride + k[None, :]
    key_block = key_ptr + n.to(tl.int64)[None, :] * key_stride + k[:, None]
    logits = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, width, BLOCK_K):
        inside_k = k < width - start
        query = tl.load(query_block, mask=inside_m[:, None] & inside_k[None, :], other=0.0)
        key = tl.load(key_block, mask=inside_n[None, :] & inside_k[:, None], other=0.0)
        logits = tl.dot(query, key, logits, input_precision="ieee")
        query_block += BLOCK_K
        key_block += BLOCK_K
    query_inverse = tl.load(query_inverse_ptr + m, mask=inside_m, other=0.0)
    key_inverse = tl.load(key_inverse_ptr + n, mask=inside_n, other=0.0)
    logits *= (query_inverse * scale)[:, None] * key_inverse[None, :]
    own = n[None, :] == (m + positive_shift)[:, None]
    if IS_KEY:
        # One tile holds a row's positive. It leaves the sum: see softplus in the formula.
        positive = tl.sum(tl.where(own, logits, 0.0), 1) - margin
        first = tile_n * BLOCK_N
        here = (m + positive_shift >= first) & (m + positive_shift < first + BLOCK_N)
        tl.store(positive_ptr + m, positive, mask=inside_m & here)
        logits = tl.where(own, float("-inf"), logits)
    else:
        logits += tl.where(own, own_bonus, 0.0)
    logits = tl.where(inside_n[None, :], logits, float("-inf"))
    if STORE_LOGITS:
        place = logits_ptr + m.to(tl.int64)[:, None] * logits_stride + n[None, :]
        tl.store(place, logits, mask=inside_m[:, None] & inside_n[None, :])
    row_max = tl.max(logits, 1)
    safe = tl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum = tl.sum(tl.exp2(logits - safe[:, None]), 1)
    place = tile_n.to(tl.int64) * row_partial_stride + m
    tl.store(row_max_ptr + place, row_max, mask=inside_m)
    tl.store(row_sum_ptr + place, row_sum, mask=inside_m)
    if COLUMNS:
        logits = tl.where(inside_m[:, None], logits, float("-inf"))
        column_max = tl.max(logits, 0)
        safe = tl.where(column_max == float("-inf"), 0.0, column_max)
        column_sum = tl.sum(tl.exp2(logits - safe[None, :]), 0)
        place = tile_m.to(tl.int64) * column_partial_stride + n
        tl.store(column_max_ptr + place, column_max, mask=inside_n)
        tl.store(column_sum_ptr + place, column_sum, mask=inside_n)


@triton.jit
def _info_nce_loss_fwd_kernel(
    max_ptr, sum_ptr, positive_ptr, loss_ptr, log_sum_exp_ptr, natural_positive_ptr,
    num_rows, num_partials,
    partial_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """loss = softplus(lse of the negatives − positive), from the partial maxima and sums of the tiles."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    highest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    max_block, sum_block = max_ptr + row, sum_ptr + row
    for _ in range(num_partials):
        maximum = tl.load(max_block, mask=inside, other=float("-inf"))
        higher = tl.maximum(highest, maximum)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(highest - safe)
        total += tl.load(sum_block, mask=inside, other=0.0) * tl.exp2(maximum - safe)
        highest = higher
        max_block += partial_stride
        sum_block += partial_stride
    positive = tl.load(positive_ptr + row, mask=inside, other=0.0)
    # (−inf) − finite is −inf: no negatives, no loss.
    gap = (highest + tl.log2(tl.where(total == 0.0, 1e-38, total)) - positive) * 0.6931471805599453
    small = tl.exp(-tl.abs(gap))
    # log1p(x) = log(1 + x) · x / ((1 + x) − 1): the rounding of 1 + x cancels.
    one_plus = 1.0 + small
    rounded = one_plus - 1.0
    log1p = tl.where(rounded == 0.0, small, tl.log(one_plus) * (small / tl.where(rounded == 0.0, 1.0, rounded)))
    loss = tl.maximum(gap, 0.0) + log1p
    tl.store(loss_ptr + row, loss, mask=inside)
    positive *= 0.6931471805599453
    tl.store(log_sum_exp_ptr + row, positive + loss, mask=inside)
    tl.store(natural_positive_ptr + row, positive, mask=inside)


@triton.jit
def _info_nce_softmax_bwd_kernel(
    logits_ptr, out_ptr, loss_ptr, log_sum_exp_ptr, weight_ptr,
    column_loss_ptr, column_log_sum_exp_ptr, column_weight_ptr,
    num_columns, positive_shift,
    logits_stride, out_stride,
    scale,
    WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """G = softmax − one-hot; with COLUMNS plus the same of the columns' softmax; each times its upstream weight."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < num_columns
    own = n == row + positive_shift
    logits = tl.load(logits_ptr + row * logits_stride + n, mask=inside, other=float("-inf"))
    softmax = tl.exp2(logits - tl.load(log_sum_exp_ptr + row) * 1.4426950408889634)
    # p − 1 at the positive is exp(−loss) − 1; −(1 − exp(−x)) keeps its digits as −x(1 − x/2 + x²/6) for small x.
    x = tl.load(loss_ptr + row)
    certainty = tl.where(x < 0.01, -x * (1.0 - x * (0.5 - x * (0.16666667 - x * 0.041666667))), tl.exp(-x) - 1.0)
    gradient = tl.where(own, certainty, softmax)
    if WEIGHTED:
        gradient *= tl.load(weight_ptr + row)
    if COLUMNS:
        log_sum_exp = tl.load(column_log_sum_exp_ptr + n, mask=inside, other=0.0)
        softmax = tl.exp2(logits - log_sum_exp * 1.4426950408889634)
        x = tl.load(column_loss_ptr + n, mask=inside, other=0.0)
        certainty = tl.where(x < 0.01, -x * (1.0 - x * (0.5 - x * (0.16666667 - x * 0.041666667))), tl.exp(-x) - 1.0)
        weight = tl.load(column_weight_ptr + n, mask=inside, other=0.0)
        gradient += tl.where(own, certainty, softmax) * weight
    tl.store(out_ptr + row * out_stride + n, (gradient * scale).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _info_nce_product_bwd_kernel(
    weights_ptr, rows_ptr, out_ptr,
    num_rows, num_columns, num_inner, inner_per_split,
    weights_stride, rows_stride, out_stride, split_stride,
    scale,
    TRANSPOSED: tl.constexpr, ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [rows, columns] (+)= scale · W rows, W [rows, inner] or its transpose; axis 1 splits the inner sum."""
    tile_m, tile_n = _swizzle(tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, BLOCK_N), 8)
    split = tl.program_id(1).to(tl.int64)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_m, inside_n = m < num_rows, n < num_columns
    k = tl.arange(0, BLOCK_K)
    first = split * inner_per_split
    last = tl.minimum(first + inner_per_split, num_inner)
    row_block = rows_ptr + (first + k)[:, None] * rows_stride + n[None, :]
    if TRANSPOSED:
        weight_block = weights_ptr + (first + k)[None, :] * weights_stride + m[:, None]
    else:
        weight_block = weights_ptr + m.to(tl.int64)[:, None] * weights_stride + (first + k)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(first, last, BLOCK_K):
        inside_k = k < last - start
        weights = tl.load(weight_block, mask=inside_m[:, None] & inside_k[None, :], other=0.0)
        rows = tl.load(row_block, mask=inside_k[:, None] & inside_n[None, :], other=0.0)
        total = tl.dot(weights, rows, total, input_precision="ieee")
        row_block += BLOCK_K * rows_stride
        if TRANSPOSED:
            weight_block += BLOCK_K * weights_stride
        else:
            weight_block += BLOCK_K
    place = out_ptr + split * split_stride + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    inside = inside_m[:, None] & inside_n[None, :]
    total *= scale
    if ACCUMULATE:
        total += tl.load(place, mask=inside, other=0.0)
    tl.store(place, total, mask=inside)


def chunk_rows(num_rows: int, num_columns: int, unit_dtype: torch.dtype, partials: int | None = None) -> int:
    """Rows a chunk: their logits and G fit into the buffer, or two numbers for each of ``partials`` tiles."""
    per_row = num_columns * (4 + unit_dtype.itemsize % 4) if partials is None else partials * 8
    return min(num_rows, max(MIN_CHUNK, TILE_BUFFER_BYTES // per_row // MIN_CHUNK * MIN_CHUNK))


class _Problem:
    """The rows of one call with their norms and unit rows, and the chunked kernels over them."""

    def __init__(
        self, query: Tensor, key: Tensor, hard_negative: Tensor | None, scalars: Scalars, gradients: bool
    ) -> None:
        self.scalars = scalars
        self.num_rows, self.width = query.shape
        self.num_keys = len(key)
        sources = [key] if hard_negative is None else [key, hard_negative]
        self.num_columns = self.num_keys * len(sources)
        self.unit_dtype = torch.float32 if query.dtype == torch.float32 else torch.float16
        self.tile = product_tile(query.device, query.dtype)
        self.gradient_scale = 1.0 if self.unit_dtype == torch.float32 else GRADIENT_SCALE

        def unit_rows(count: int) -> Tensor:
            return query.new_empty(count if gradients else 0, self.width, dtype=self.unit_dtype)

        def prepare(rows: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
            wanted = unit if gradients else None
            return prepare_rows(rows, None, None, None, pooled=False, unit=wanted, inverse=True)

        n = self.num_keys
        self.query_unit, self.column_unit = unit_rows(self.num_rows), unit_rows(self.num_columns)
        self.query, self.query_inverse = prepare(query, self.query_unit)
        prepared = [prepare(t, self.column_unit[i * n : (i + 1) * n]) for i, t in enumerate(sources)]
        self.columns, self.column_inverse = [t for t, _ in prepared], [norm for _, norm in prepared]
        partials = None if gradients else self._partials()
        self.chunk = chunk_rows(self.num_rows, self.num_columns, self.unit_dtype, partials)

    def _block(self, name: str) -> int:
        return dict(self.tile.blocks)[name]

    def _partials(self) -> int:
        """Tiles side by side in a row of logits."""
        return triton.cdiv(self.num_keys, self._block("BLOCK_N")) * (self.num_columns // self.num_keys)

    def chunks(self) -> range:
        return range(0, self.num_rows, self.chunk)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.query.new_empty(shape, dtype=dtype)

    def logits(
        self,
        start: int,
        logits: Tensor | None,
        row_partials: Tensor,
        column_partials: Tensor | None,
        positive: Tensor,
    ) -> None:
        """Base-2 logits of the rows from ``start`` on, their tiles' partial results and positives."""
        scalars = self.scalars
        rows = min(self.chunk, self.num_rows - start)
        for part, (key, inverse) in enumerate(zip(self.columns, self.column_inverse, strict=True)):
            first = part * self._partials() // len(self.columns)
            out = None if logits is None else logits[:, part * self.num_keys :]
            launch(
                _info_nce_logits_fwd_kernel,
                lambda c: (triton.cdiv(rows, c["BLOCK_M"]) * triton.cdiv(self.num_keys, c["BLOCK_N"]),),
                self.query[start:], key, self.query_inverse[start:], inverse, out,
                row_partials[0, first:], row_partials[1, first:],
                None if column_partials is None else column_partials[0],
                None if column_partials is None else column_partials[1],
                positive[start:],
                rows, self.num_keys, self.width, start + scalars.positive_offset,
                self.query.stride(0), key.stride(0), 0 if logits is None else logits.stride(0),
                row_partials.stride(1), 0 if column_partials is None else column_partials.stride(1),
                LOG2_E / scalars.temperature, LOG2_E * scalars.margin / scalars.temperature,
                LOG2_E * scalars.hard_negative_weight,
                tile=self.tile,
                IS_KEY=part == 0, STORE_LOGITS=logits is not None, COLUMNS=column_partials is not None,
            )  # fmt: skip

    def losses(self, count: int, partials: Tensor, positive: Tensor, out: Sequence[Tensor]) -> None:
        """(loss, log_sum_exp, natural positive) of ``count`` rows or columns from the partial results."""
        launch(
            _info_nce_loss_fwd_kernel, lambda c: (triton.cdiv(count, c["BLOCK"]),),
            partials[0], partials[1], positive, *out,
            count, partials.shape[1],
            partials.stride(1),
            tile=Tile((("BLOCK", 128),), 4, 1),
        )  # fmt: skip

    def weights(self, logits: Tensor, start: int, loss: Tensor, log_sum_exp: Tensor, upstream: Any) -> Tensor:
        """G of a chunk, in place where it is float32; ``upstream`` is None (ones) or see ``rows_backward``."""
        in_place = self.unit_dtype == torch.float32
        out = logits if in_place else torch.empty_like(logits, dtype=self.unit_dtype)
        row_weight, column_loss, column_lse, column_weight = upstream or (None,) * 4
        launch(
            _info_nce_softmax_bwd_kernel,
            lambda c: (len(logits), triton.cdiv(self.num_columns, c["BLOCK"])),
            logits, out, loss[start:], log_sum_exp[start:], None if row_weight is None else row_weight[start:],
            column_loss, column_lse, column_weight,
            self.num_columns, start + self.scalars.positive_offset,
            logits.stride(0), out.stride(0),
            self.gradient_scale,
            tile=Tile((("BLOCK", 1024),), 4, 1),
            WEIGHTED=row_weight is not None, COLUMNS=column_loss is not None,
        )  # fmt: skip
        return out

    def product(
        self, weights: Tensor, rows: Tensor, out: Tensor, *, transposed: bool, accumulate: bool, splits: int = 1
    ) -> None:
        """out [m, D] (+)= W rows/(τ · gradient scale), or Wᵀ rows; out is [splits, m, D] when split."""
        inner = len(rows)
        per_split = triton.cdiv(triton.cdiv(inner, splits), self._block("BLOCK_K")) * self._block("BLOCK_K")
        shape = out.shape[-2:]
        launch(
            _info_nce_product_bwd_kernel,
            lambda c: (triton.cdiv(shape[0], c["BLOCK_M"]) * triton.cdiv(shape[1], c["BLOCK_N"]), splits),
            weights, rows, out,
            shape[0], shape[1], inner, per_split,
            weights.stride(0), rows.stride(0), out.stride(-2), out.stride(0) if splits > 1 else 0,
            1.0 / (self.scalars.temperature * self.gradient_scale),
            tile=self.tile, tuned=("num_rows", "num_columns", "num_inner"),
            accumulates=("out_ptr",) if accumulate else (),
            TRANSPOSED=transposed, ACCUMULATE=accumulate,
        )  # fmt: skip

    def add_gradients(self, weights: Tensor, start: int, gradients: list[Tensor]) -> None:
        """The gradient products of a chunk, into the buffers of ``gradient_buffers``."""
        rows, n = slice(start, start + len(weights)), self.num_keys
        if len(gradients[0]):
            blocks = (
                triton.cdiv(len(weights), self._block("BLOCK_M")),
                triton.cdiv(self.width, self._block("BLOCK_N")),
            )
            splits = min(triton.cdiv(TARGET_PROGRAMS, math.prod(blocks)), 32, triton.cdiv(self.num_columns, 512))
            target = gradients[0][rows]
            out = self.empty(splits, *target.shape) if splits > 1 else target
            self.product(weights, self.column_unit, out, transposed=False, accumulate=False, splits=splits)
            if splits > 1:
                torch.sum(out, 0, out=target)
        for part, gradient in enumerate(gradients[1:]):
            if len(gradient):
                own = weights[:, part * n : (part + 1) * n]
                self.product(own, self.query_unit[rows], gradient, transposed=True, accumulate=start > 0)

    def gradient_buffers(self, needs: tuple[bool, bool, bool]) -> list[Tensor]:
        """Unit-row gradients of query, keys and hard negatives, float32; [0] where not needed."""
        sizes = (self.num_rows, self.num_keys, self.num_columns - self.num_keys)
        return [
            self.empty(size, self.width) if needed and size else self.empty(0)
            for size, needed in zip(sizes, needs, strict=True)
        ]

    def inverse_norms(self, needs: tuple[bool, bool, bool]) -> list[Tensor]:
        """Of query, keys and hard negatives, [.., 1]; [0] where not needed."""
        norms = [self.query_inverse, *self.column_inverse, self.empty(0)][:3]
        return [norm if needed else self.empty(0) for norm, needed in zip(norms, needs, strict=True)]


def rows_forward(
    query: Tensor, key: Tensor, hard_negative: Tensor | None, scalars: Scalars, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See ``info_nce_torch.rows_forward``. One product, no logits stored."""
    problem = _Problem(query, key, hard_negative, scalars, gradients=False)
    results, scaled_positive = tuple(problem.empty(len(query)) for _ in range(3)), problem.empty(len(query))
    row_partials = problem.empty(2, problem._partials(), problem.chunk)
    column_partials = None
    if symmetric:  # the first entry is what earlier chunks came to
        tiles = triton.cdiv(problem.chunk, problem._block("BLOCK_M"))
        column_partials = problem.empty(2, tiles + 1, len(key))
        column_partials[0, 0], column_partials[1, 0] = float("-inf"), 0.0
    for start in problem.chunks():
        rows = min(problem.chunk, len(query) - start)
        columns = None
        if column_partials is not None:
            columns = column_partials[:, 1:]
            columns[0], columns[1] = float("-inf"), 0.0  # a last chunk has fewer tiles
        problem.logits(start, None, row_partials, columns, scaled_positive)
        problem.losses(rows, row_partials, scaled_positive[start:], tuple(t[start:] for t in results))
        if column_partials is not None:
            highest = column_partials[0].amax(0)
            shift = torch.where(highest == float("-inf"), 0.0, highest)
            column_partials[1, 0] = (column_partials[1] * torch.exp2(column_partials[0] - shift)).sum(0)
            column_partials[0, 0] = highest
    if column_partials is None:
        return results[0], results[1], results[2], problem.empty(0), problem.empty(0)
    column_results = tuple(problem.empty(len(key)) for _ in range(3))
    problem.losses(len(key), column_partials[:, :1], scaled_positive, column_results)
    return results[0], results[1], results[2], column_results[0], column_results[1]


def sum_with_gradients(
    query: Tensor, key: Tensor, hard_negative: Tensor | None, scalars: Scalars, needs: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    """See ``info_nce_torch.sum_with_gradients``."""
    problem = _Problem(query, key, hard_negative, scalars, gradients=True)
    results, scaled_positive = tuple(problem.empty(len(query)) for _ in range(3)), problem.empty(len(query))
    gradients = problem.gradient_buffers(needs)
    row_partials = problem.empty(2, problem._partials(), problem.chunk)
    buffer = problem.empty(problem.chunk, problem.num_columns)
    for start in problem.chunks():
        logits = buffer[: len(query) - start]
        problem.logits(start, logits, row_partials, None, scaled_positive)
        problem.losses(len(logits), row_partials, scaled_positive[start:], tuple(t[start:] for t in results))
        weights = problem.weights(logits, start, results[0], results[1], None)
        problem.add_gradients(weights, start, gradients)
    return results[0].sum(), results[1], results[2], gradients, problem.inverse_norms(needs)


def rows_backward(
    row_upstream: Tensor, column_upstream: Tensor, query: Tensor, key: Tensor, hard_negative: Tensor | None,
    loss: Tensor, log_sum_exp: Tensor, column_loss: Tensor, column_log_sum_exp: Tensor,
    scalars: Scalars, needs: tuple[bool, bool, bool],
) -> list[Tensor]:  # fmt: skip
    """See ``info_nce_torch.rows_backward``. Upstream gradients enter divided by the largest, so that |G| ≤ 1."""
    problem = _Problem(query, key, hard_negative, scalars, gradients=True)
    symmetric = len(column_loss) > 0
    largest = row_upstream.abs().amax()
    if symmetric:
        largest = largest + column_upstream.abs().amax()
    largest = torch.where(largest > 0, largest, 1.0)
    upstream = (row_upstream / largest, *((None,) * 3 if not symmetric else (
        column_loss, column_log_sum_exp, column_upstream / largest)))  # fmt: skip
    gradients = problem.gradient_buffers(needs)
    row_partials = problem.empty(2, problem._partials(), problem.chunk)
    buffer, scaled_positive = problem.empty(problem.chunk, problem.num_columns), problem.empty(len(query))
    for start in problem.chunks():
        logits = buffer[: len(query) - start]
        problem.logits(start, logits, row_partials, None, scaled_positive)
        weights = problem.weights(logits, start, loss, log_sum_exp, upstream)
        problem.add_gradients(weights, start, gradients)
    # Float32 gradients are projected in place.
    return [
        project_rows(g, rows, i, largest, out=g if rows.dtype == torch.float32 else None)
        if rows is not None and needed
        else query.new_empty(0)
        for g, rows, i, needed in zip(
            gradients, (query, key, hard_negative), problem.inverse_norms(needs), needs, strict=True
        )
    ]
