# SPDX-License-Identifier: Apache-2.0
"""The gather minus the delta against a loop."""

import pytest
import torch
from fastprompt_kernels import mask_delta_pool


def by_loop(hidden, mask_index, delta_index, delta_rows):
    return torch.stack(
        [hidden[m] - delta_rows[d] for m, d in zip(mask_index.tolist(), delta_index.tolist(), strict=True)]
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_forward_and_gradients(dtype):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(20, 6, generator=generator).to(dtype).requires_grad_()
    deltas = torch.randn(3, 6, generator=generator).to(dtype).requires_grad_()
    mask_index, delta_index = (
        torch.tensor([4, 9, 9, 0, 19]),
        torch.tensor([2, 0, 2, 2, 0]),
    )  # row 9 twice, delta 1 never
    upstream = torch.randn(5, 6, generator=generator).to(dtype)
    output = mask_delta_pool(hidden, mask_index, delta_index, deltas)
    assert torch.equal(output, by_loop(hidden, mask_index, delta_index, deltas))
    got = torch.autograd.grad(output, (hidden, deltas), upstream)
    exact = [t.detach().double().requires_grad_() for t in (hidden, deltas)]
    want = torch.autograd.grad(by_loop(exact[0], mask_index, delta_index, exact[1]), exact, upstream.double())
    for gradient, expected in zip(got, want, strict=True):
        torch.testing.assert_close(
            gradient.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps * 4
        )


def test_without_delta_is_a_plain_gather():
    hidden = torch.randn(7, 3)
    assert torch.equal(mask_delta_pool(hidden, torch.tensor([6, 0])), hidden[[6, 0]])


def test_gradcheck():
    hidden, deltas = torch.randn(5, 3).double().requires_grad_(), torch.randn(2, 3).double().requires_grad_()
    index = torch.tensor([4, 1, 1]), torch.tensor([0, 1, 0])
    assert torch.autograd.gradcheck(lambda h, d: mask_delta_pool(h, index[0], index[1], d), (hidden, deltas))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3), torch.tensor([0])), r"hidden_states \[T, H\]"),
        ((torch.zeros(3, 2), torch.tensor([0]), torch.tensor([0]), None), "together, or neither"),
        (
            (torch.zeros(3, 2), torch.tensor([0]), torch.tensor([0, 0]), torch.zeros(1, 2)),
            "one delta_index a sentence",
        ),
        ((torch.zeros(3, 2), torch.tensor([0]), torch.tensor([0]), torch.zeros(1, 3)), r"delta_rows \[K, 2\]"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        mask_delta_pool(*arguments)


def test_index_out_of_range():
    with pytest.raises(IndexError):
        mask_delta_pool(torch.zeros(3, 2), torch.tensor([3]))
