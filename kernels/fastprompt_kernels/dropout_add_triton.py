# SPDX-License-Identifier: Apache-2.0
"""Dropout and residual sum in Triton: one pass over the values, decisions drawn in registers.

The backward is the same pass over the gradient, without a residual.
"""

import triton
import triton.language as tl
from torch import Tensor

from fastprompt_kernels import counter_rng
from fastprompt_kernels.counter_rng_triton import keep_mask
from fastprompt_kernels.launcher import Tile, launch

BLOCK_VALUES = 2048
"""Values of one program: several short rows, or one long one."""


@triton.jit(do_not_specialize=["seed"])  # a new value every call
def _dropout_add_fwd_kernel(
    values_ptr, residual_ptr, out_ptr,
    num_rows, width,
    values_stride, residual_stride, out_stride,
    factor, seed, threshold,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    inside = (rows < num_rows)[:, None] & (d < width)[None, :]
    values = tl.load(values_ptr + rows[:, None] * values_stride + d[None, :], mask=inside, other=0.0).to(tl.float32)
    out = tl.where(keep_mask(seed, rows, d, 0, 1, threshold), values * factor, 0.0)
    if HAS_RESIDUAL:
        out += tl.load(residual_ptr + rows[:, None] * residual_stride + d[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(out_ptr + rows[:, None] * out_stride + d[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


def run(values: Tensor, residual: Tensor | None, out: Tensor, dropout_p: float, seed: int) -> None:
    """out = dropout(values) [+ residual]; rows may lie apart, values of a row may not."""
    values = values if values.stride(1) == 1 else values.contiguous()
    residual = residual if residual is None or residual.stride(1) == 1 else residual.contiguous()
    num_rows, width = values.shape
    block_d = triton.next_power_of_2(width)
    tile = Tile((("BLOCK_M", max(1, BLOCK_VALUES // block_d)), ("BLOCK_D", block_d)), num_warps=4, num_stages=1)
    launch(
        _dropout_add_fwd_kernel,
        lambda meta: (triton.cdiv(num_rows, meta["BLOCK_M"]),),
        values, residual, out,
        num_rows, width,
        values.stride(0), 0 if residual is None else residual.stride(0), out.stride(0),
        counter_rng.keep_scale(dropout_p), counter_rng.mix_seed(seed), counter_rng.drop_threshold(dropout_p),
        tile=tile,
        HAS_RESIDUAL=residual is not None,
    )  # fmt: skip
