# SPDX-License-Identifier: Apache-2.0
"""Dropout decisions from a counter: the same on every device, in the forward and again in the backward.

    z = mix(seed + (counter + 1) · γ),    counter = (row · num_heads + head) · 2¹⁴ + column // 4
    keep(row, head, column)  ⇔  the (column mod 4)-th 16 bits of z, as a signed number, ≥ threshold − 2¹⁵

``mix`` and γ are SplitMix64's (Steele, Lea and Flood, 2014): two multiplications for four decisions, where Philox
needs twenty for four. The probability is rounded to 1/65,536, and kept values are scaled by its exact inverse.
"""

import torch
from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
COLUMN_GROUPS = 1 << 14
_MASK = (1 << 64) - 1


def mix_seed(seed: int) -> int:
    """SplitMix64 of any integer, in [2⁶², 2⁶³): a full-width value, so that seeds 0, 1, 2 … lie far apart."""
    z = (seed + GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * MIX_2) & _MASK
    return ((z ^ (z >> 31)) >> 2) | (1 << 62)


def drop_threshold(dropout_p: float) -> int:
    """How many of the 65,536 values drop."""
    return round(dropout_p * 65536)


def keep_scale(dropout_p: float) -> float:
    """What kept values are multiplied by."""
    return 65536 / (65536 - drop_threshold(dropout_p))


def check_probability(op: str, dropout_p: float) -> None:
    """Raise a ValueError unless ``dropout_p`` leaves something."""
    if not 0 <= dropout_p < 1 or drop_threshold(dropout_p) == 65536:
        raise ValueError(f"{op} wants 0 ≤ dropout_p < 1, got {dropout_p}")


def keep_mask(seed: int, rows: Tensor, num_heads: int, num_columns: int, dropout_p: float) -> Tensor:
    """Which weights survive, int16, 1 or 0, [*rows.shape[:-1], num_heads, rows.shape[-1], num_columns].

    ``rows`` are row numbers, int64. (Not bool: a CPU takes six times as long to make it and to turn it into floats.)
    """
    groups = (num_columns + 3) // 4
    heads = torch.arange(num_heads, device=rows.device).unsqueeze(1) * COLUMN_GROUPS
    counter = rows.unsqueeze(-2) * (num_heads * COLUMN_GROUPS) + heads + 1
    first = counter.mul_(_signed(GAMMA)).add_(mix_seed(seed))
    z = first.unsqueeze(-1) + torch.arange(groups, device=rows.device) * _signed(GAMMA)
    shifted = torch.empty_like(z)
    for shift, factor in ((30, MIX_1), (27, MIX_2), (31, 1)):
        torch.bitwise_right_shift(z, shift, out=shifted)
        z.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))
        if factor != 1:
            z.mul_(_signed(factor))
    draws = z.view(torch.int16)
    return torch.ge(draws, drop_threshold(dropout_p) - 32768, out=draws)[..., :num_columns]


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value
