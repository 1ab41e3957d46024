# SPDX-License-Identifier: Apache-2.0
"""How far a kernel may be from float64, in one table, and inputs that show reads out of bounds."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes bf16 wrongly (it truncates, and its products of bf16 operands are garbage): bf16 products are
# left to compiled kernels. On a GPU all three are tested.
TRITON_DTYPES = (torch.float32, torch.float16) if DEVICE == "cpu" else (torch.float32, torch.float16, torch.bfloat16)

# A kernel may err c times as much as plain torch in the same dtype, plus a floor, both measured against float64.
FACTOR = {"forward": 2.0, "gradient": 3.0}
FLOOR = {
    # Logits are cosines times 1/τ = 20 (100 when cold): their absolute error of a few 20 · 6e-8 is the relative error of
    # every probability, and so of a small loss and of the gradient, whatever the order of summation.
    ("forward", torch.float64): 1e-13,
    ("gradient", torch.float64): 1e-12,
    ("forward", torch.float32): 5e-6,
    ("gradient", torch.float32): 1e-5,
    # float16 rounds to 4.9e-4 at most, 2e-4 on average: operands of gradient products and of attention weights are rounded.
    ("forward", torch.float16): 3e-4,
    ("gradient", torch.float16): 3e-4,
    # bf16 rounds to 3.9e-3 at most, 1.7e-3 on average.
    ("forward", torch.bfloat16): 2e-3,
    ("gradient", torch.bfloat16): 2e-3,
}


def error(got, exact):
    """Relative error of the whole tensor, in the 2-norm; absolute where the exact result is zero."""
    difference = (got.detach().double().cpu() - exact.detach().double().cpu()).norm()
    scale = exact.detach().double().norm().cpu()
    return (difference / scale if scale > 0 else difference).item()


def assert_near(name, kind, dtype, got, plain, exact):
    """The rule of the table above."""
    assert got.shape == exact.shape, name
    assert torch.isfinite(got).all(), f"{name} is not finite"
    allowed = FACTOR[kind] * error(plain, exact) + FLOOR[kind, dtype]
    assert error(got, exact) <= allowed, f"{name}: error {error(got, exact):.1e}, allowed {allowed:.1e}"


def guarded(tensor, layout="rows"):
    """A copy of ``tensor`` inside a larger buffer of NaN. "rows": rows apart; "strided": not contiguous in any axis."""
    if layout == "contiguous":
        buffer = tensor.new_full((tensor.shape[0] + 2, *tensor.shape[1:]), float("nan"))
        inner = buffer[1:-1]
    elif layout == "rows":
        buffer = tensor.new_full((tensor.shape[0] + 2, *tensor.shape[1:-1], tensor.shape[-1] + 5), float("nan"))
        inner = buffer[1:-1, ..., 2 : 2 + tensor.shape[-1]]
    else:
        buffer = tensor.new_full((tensor.shape[0] * 2 + 2, *tensor.shape[1:-1], tensor.shape[-1] * 2), float("nan"))
        inner = buffer[1:-1:2, ..., ::2]
    inner.copy_(tensor)
    return inner.detach().requires_grad_(tensor.is_floating_point())
