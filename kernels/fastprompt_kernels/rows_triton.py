# SPDX-License-Identifier: Apache-2.0
"""Triton kernels over single rows: gather, delta, norm; projection; deterministic scatter.

    pooled_i = x[index_i] − delta[delta_index_i],    unit_i = pooled_i/‖pooled_i‖      (_rows_fwd_kernel)
    dx_i = g · (I − x̂_i x̂_iᵀ) dunit_i/‖x_i‖                                          (_project_rows_bwd_kernel)
    out_r = ± Σ over the rows i with index_i = r, in the order of i                     (_segment_sum_bwd_kernel)

Everything is float32 between load and store. No atomics: one program owns each result.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastprompt_kernels.info_nce_torch import COSINE_EPS
from fastprompt_kernels.launcher import Tile, launch


@triton.jit
def _rows_fwd_kernel(
    rows_ptr, index_ptr, delta_ptr, delta_index_ptr, pooled_ptr, unit_ptr, inverse_ptr,
    num_sources, num_deltas, width,
    rows_stride, delta_stride, pooled_stride, unit_stride,
    eps,
    HAS_INDEX: tl.constexpr, HAS_DELTA: tl.constexpr, STORE_POOLED: tl.constexpr, STORE_INVERSE: tl.constexpr,
    STORE_UNIT: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = d < width
    source = row
    if HAS_INDEX:
        source = tl.load(index_ptr + row)
        tl.device_assert((source >= 0) & (source < num_sources), "mask_index is out of range")
    x = tl.load(rows_ptr + source * rows_stride + d, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        which = tl.load(delta_index_ptr + row)
        tl.device_assert((which >= 0) & (which < num_deltas), "delta_index is out of range")
        x -= tl.load(delta_ptr + which * delta_stride + d, mask=inside, other=0.0).to(tl.float32)
    if STORE_POOLED:
        pooled = x.to(pooled_ptr.dtype.element_ty)
        tl.store(pooled_ptr + row * pooled_stride + d, pooled, mask=inside)
        x = pooled.to(tl.float32)  # the norm is that of what was stored
    if STORE_INVERSE:
        norm = tl.sqrt(tl.sum(x * x, 0))
        inverse = tl.where(norm > eps, 1.0 / tl.maximum(norm, eps), 0.0)
        tl.store(inverse_ptr + row, inverse)
        if STORE_UNIT:
            tl.store(unit_ptr + row * unit_stride + d, (x * inverse).to(unit_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _project_rows_bwd_kernel(
    gradient_ptr, rows_ptr, inverse_ptr, upstream_ptr, out_ptr,
    width,
    gradient_stride, rows_stride, out_stride,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = d < width
    gradient = tl.load(gradient_ptr + row * gradient_stride + d, mask=inside, other=0.0)
    inverse = tl.load(inverse_ptr + row)
    unit = tl.load(rows_ptr + row * rows_stride + d, mask=inside, other=0.0).to(tl.float32) * inverse
    along = tl.sum(gradient * unit, 0)
    out = (gradient - along * unit) * (inverse * tl.load(upstream_ptr))
    tl.store(out_ptr + row * out_stride + d, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _segment_sum_bwd_kernel(
    gradient_ptr, order_ptr, start_ptr, upstream_ptr, out_ptr,
    width,
    gradient_stride, out_stride,
    sign,
    HAS_UPSTREAM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    target = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = d < width
    total = tl.zeros([BLOCK_D], dtype=tl.float32)
    first = tl.load(start_ptr + target)
    last = tl.load(start_ptr + target + 1)
    for i in range(first, last):
        row = tl.load(order_ptr + i)
        total += tl.load(gradient_ptr + row * gradient_stride + d, mask=inside, other=0.0).to(tl.float32)
    if HAS_UPSTREAM:
        total *= tl.load(upstream_ptr)
    tl.store(out_ptr + target * out_stride + d, (sign * total).to(out_ptr.dtype.element_ty), mask=inside)


def _row_tile(width: int) -> Tile:
    block = triton.next_power_of_2(max(width, 16))
    return Tile((("BLOCK_D", block),), min(8, max(1, block // 256)), 1)


def _inner_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def prepare_rows(
    rows: Tensor, index: Tensor | None, delta_index: Tensor | None, deltas: Tensor | None,
    *, pooled: bool, unit: Tensor | None = None, inverse: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(pooled rows or ``rows`` itself, inverse norms [N, 1] or [0]); the unit rows go into ``unit``."""
    rows = _inner_contiguous(rows)
    deltas = None if deltas is None else _inner_contiguous(deltas)
    index = None if index is None else index.contiguous()
    delta_index = None if delta_index is None else delta_index.contiguous()
    count = len(rows) if index is None else len(index)
    out = rows.new_empty(count, rows.shape[1]) if pooled else rows
    norms = rows.new_empty((count, 1) if inverse else (0,), dtype=torch.float32)
    if count:
        launch(
            _rows_fwd_kernel, lambda _: (count,),
            rows, index, deltas, delta_index, out, unit, norms,
            len(rows), 0 if deltas is None else len(deltas), rows.shape[1],
            rows.stride(0), 0 if deltas is None else deltas.stride(0), out.stride(0),
            0 if unit is None else unit.stride(0),
            COSINE_EPS,
            tile=_row_tile(rows.shape[1]),
            HAS_INDEX=index is not None, HAS_DELTA=deltas is not None, STORE_POOLED=pooled,
            STORE_INVERSE=inverse, STORE_UNIT=unit is not None,
        )  # fmt: skip
    return out, norms


def project_rows(
    gradient: Tensor, rows: Tensor, inverse: Tensor, upstream: Tensor, out: Tensor | None = None
) -> Tensor:
    """Gradient of ``rows`` [N, D] from that of the unit rows (float32), times the scalar tensor ``upstream``.

    In the dtype of ``rows``, or into ``out``, which may be ``gradient`` itself.
    """
    rows = _inner_contiguous(rows)
    if out is None:
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    launch(
        _project_rows_bwd_kernel, lambda _: (len(rows),),
        gradient, rows, inverse, upstream, out,
        rows.shape[1],
        gradient.stride(0), rows.stride(0), out.stride(0),
        tile=_row_tile(rows.shape[1]),
    )  # fmt: skip
    return out


def segment_sum(
    gradient: Tensor, index: Tensor, num_targets: int, sign: float, upstream: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """[num_targets, D]: sign · upstream · the sum of the rows of ``gradient`` that ``index`` sends to each target.

    Sorted, so that each sum has one owner and one order: bit-identical from call to call.
    """
    gradient = _inner_contiguous(gradient)
    ordered, order = torch.sort(index, stable=True)
    starts = torch.searchsorted(ordered, torch.arange(num_targets + 1, device=index.device))
    out = gradient.new_empty(num_targets, gradient.shape[1], dtype=dtype)
    if num_targets:
        launch(
            _segment_sum_bwd_kernel, lambda _: (num_targets,),
            gradient, order, starts, upstream, out,
            gradient.shape[1],
            gradient.stride(0), out.stride(0),
            sign,
            tile=_row_tile(gradient.shape[1]), HAS_UPSTREAM=upstream is not None,
        )  # fmt: skip
    return out
