# SPDX-License-Identifier: Apache-2.0
"""``counter_rng`` inside a Triton kernel."""

import triton
import triton.language as tl

from fastprompt_kernels import counter_rng

_GAMMA = tl.constexpr(counter_rng.GAMMA)
_MIX_1 = tl.constexpr(counter_rng.MIX_1)
_MIX_2 = tl.constexpr(counter_rng.MIX_2)
_COLUMN_GROUPS = tl.constexpr(counter_rng.COLUMN_GROUPS)


@triton.jit
def keep_mask(seed, rows, columns, head, num_heads, threshold):
    """bool [M, N] for row numbers [M] and columns [N]."""
    base = (rows.to(tl.int64) * num_heads + head) * _COLUMN_GROUPS + 1
    counter = base[:, None] + (columns // 4).to(tl.int64)[None, :]
    z = counter.to(tl.uint64) * _GAMMA + seed.to(tl.uint64)
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    z = z ^ (z >> 31)
    lane = (z >> ((columns % 4) * 16).to(tl.uint64)[None, :]).to(tl.int32) & 0xFFFF
    return (lane ^ 0x8000) >= threshold
