# SPDX-License-Identifier: Apache-2.0
"""InfoNCE against its formula, written out in float64."""

import pytest
import torch
from fastprompt_kernels import info_nce
from hypothesis import given, settings
from hypothesis import strategies as st

# Relative errors against float64. The computation is float32 whatever the input; bf16 and fp16 inputs are exact in
# float32, so only the gradients' rounding to the input's dtype adds to it.
FORWARD = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6}
GRADIENT = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}


def by_formula(query, key, temperature, offset, hard_negative, weight):
    """Row losses by the definition, one logit at a time."""

    def cosine(a, b):
        return a @ b / torch.clamp(a.norm() * b.norm(), min=1e-16)

    losses = []
    for i in range(len(query)):
        positive = i + offset
        logits = [cosine(query[i], k) / temperature for k in key]
        if hard_negative is not None:
            logits += [
                cosine(query[i], h) / temperature + (weight if j == positive else 0.0)
                for j, h in enumerate(hard_negative)
            ]
        losses.append(torch.logsumexp(torch.stack(logits), 0) - logits[positive])
    return torch.stack(losses)


def inputs(rows, columns, width, offset, dtype, hard):
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    query = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    key = torch.randn(columns, width, generator=generator, dtype=torch.float64)
    # Real matches, so that the softmax is not flat; noisy ones, since the formula's own gradient loses digits to
    # cancellation (p − 1) where a positive is certain.
    key[offset : offset + rows] = query + 1.5 * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    negative = torch.randn(columns, width, generator=generator, dtype=torch.float64) if hard else None
    tensors = [None if t is None else t.to(dtype).requires_grad_() for t in (query, key, negative)]
    return tensors


@pytest.mark.parametrize("dtype", FORWARD, ids=str)
@pytest.mark.parametrize(("rows", "columns", "width", "offset"), [(8, 8, 32, 0), (5, 13, 7, 6), (1, 3, 5, 2)])
@pytest.mark.parametrize("weight", [None, 0.0, 1.0], ids=["pairs", "triples", "weighted"])
def test_forward_and_gradients(dtype, rows, columns, width, offset, weight):
    tensors = inputs(rows, columns, width, offset, dtype, hard=weight is not None)
    output = info_nce(
        tensors[0], tensors[1], temperature=0.05, positive_offset=offset, hard_negative=tensors[2],
        hard_negative_weight=weight or 0.0, reduction="none",
    )  # fmt: skip
    exact = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    expected = by_formula(exact[0], exact[1], 0.05, offset, exact[2], weight or 0.0)
    assert output.loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    scale = expected.abs().max().clamp(min=1.0)
    assert (output.loss.double() - expected).abs().max() / scale < 20 * FORWARD[dtype]  # 1/τ = 20
    upstream = torch.linspace(0.5, 2.0, rows, dtype=torch.float64)
    (output.loss * upstream.to(output.loss.dtype)).sum().backward()
    (expected * upstream).sum().backward()
    for got, want in zip(tensors, exact, strict=True):
        if got is not None:
            assert (got.grad.double() - want.grad).norm() / want.grad.norm() < GRADIENT[dtype]


def test_reports_log_sum_exp_and_positive_logit():
    query, key, _ = inputs(4, 6, 8, 1, torch.float64, hard=False)
    output = info_nce(query, key, temperature=0.1, positive_offset=1)
    cosine = torch.nn.functional.cosine_similarity(query.unsqueeze(1), key.unsqueeze(0), dim=-1)
    torch.testing.assert_close(output.log_sum_exp, torch.logsumexp(cosine / 0.1, 1).detach())
    torch.testing.assert_close(output.positive_logit, (cosine / 0.1).diagonal(1)[:4].detach())
    torch.testing.assert_close(output.loss, (output.log_sum_exp - output.positive_logit).mean())


@pytest.mark.parametrize("weight", [None, 0.7])
def test_gradcheck(weight):
    tensors = inputs(3, 5, 4, 1, torch.float64, hard=weight is not None)

    def function(query, key, hard_negative=None):
        return info_nce(
            query, key, temperature=0.5, positive_offset=1, hard_negative=hard_negative,
            hard_negative_weight=weight or 0.0,
        ).loss  # fmt: skip

    assert torch.autograd.gradcheck(function, [t for t in tensors if t is not None])


def test_gradient_survives_an_almost_certain_positive():
    query = torch.eye(4, 8).requires_grad_()
    key = torch.eye(4, 8) + 1e-3
    info_nce(query, key, temperature=0.05, reduction="sum").loss.backward()
    exact = query.detach().double().requires_grad_()
    by_formula(exact, key.double(), 0.05, 0, None, 0.0).sum().backward()
    assert (query.grad - exact.grad).norm() / exact.grad.norm() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [0.0, 1e4, 1.0], ids=["zero rows", "huge rows", "identical rows"])
def test_degenerate_rows_stay_finite(dtype, scale):
    query = (scale * torch.ones(3, 16)).to(dtype).requires_grad_()
    key = (scale * torch.ones(3, 16)).to(dtype).requires_grad_()
    loss = info_nce(query, key, temperature=0.01).loss
    loss.backward()
    assert loss.item() == pytest.approx(torch.tensor(3.0).log().item(), rel=1e-5)
    assert torch.isfinite(query.grad).all()
    assert torch.isfinite(key.grad).all()


def test_one_row_has_no_negative_and_no_loss():
    query = torch.randn(1, 8, requires_grad=True)
    loss = info_nce(query, query.detach() + 1.0, temperature=0.05).loss
    loss.backward()
    assert loss.item() == 0.0
    assert torch.isfinite(query.grad).all()


def test_autocast_does_not_lower_the_logits_precision():
    query, key, _ = inputs(16, 16, 64, 0, torch.float32, hard=False)
    plain = info_nce(query, key, temperature=0.05).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert info_nce(query, key, temperature=0.05).loss.item() == plain.item()


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 9), extra=st.integers(0, 9), width=st.integers(1, 40), data=st.data())
def test_any_shape(rows, extra, width, data):
    offset = data.draw(st.integers(0, extra))
    query, key, negative = inputs(rows, rows + extra, width, offset, torch.float64, hard=True)
    got = info_nce(
        query, key, temperature=0.2, positive_offset=offset, hard_negative=negative, hard_negative_weight=0.3
    ).loss
    torch.testing.assert_close(got, by_formula(query, key, 0.2, offset, negative, 0.3).mean())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(2, 3)}, r"query \[B, D\] and key \[N, D\]"),
        ({"query": torch.zeros(0, 4)}, "at least one query"),
        ({"temperature": 0.0}, "temperature > 0"),
        ({"positive_offset": 3}, "do not fit into 4 keys"),
        ({"hard_negative": torch.zeros(3, 4)}, "as many hard negatives as keys"),
        ({"reduction": "max"}, "'max'"),
    ],
)
def test_errors(changes, message):
    arguments = {"query": torch.zeros(2, 4), "key": torch.zeros(4, 4), "temperature": 0.05, **changes}
    with pytest.raises(ValueError, match=message):
        info_nce(**arguments)
