# SPDX-License-Identifier: Apache-2.0
"""Every op's Triton and torch path against its float64 reference: results, all gradients, any shape."""

import pytest
import torch
from fastprompt_kernels import dropout_add, info_nce, mask_delta_pool, packed_attention, prompt_info_nce
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, TRITON_DTYPES, assert_near, guarded

pytestmark = pytest.mark.usefixtures("poisoned")
FLOATS = [("triton", dtype) for dtype in TRITON_DTYPES] + [
    ("torch", dtype) for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
]
BACKENDS = pytest.mark.parametrize(("backend", "dtype"), FLOATS, ids=lambda v: str(v).removeprefix("torch."))


def compare(function, tensors, dtype, backend, layout="rows", *, cancelled=None):
    """``function(backend, *tensors)`` gives a tuple of results; the first takes a random upstream gradient.

    ``cancelled``: for gradients that are zero, the size of the terms that cancel; their rounding is relative to it.
    """
    generator = torch.Generator().manual_seed(7)
    runs = []
    for name, kind in ((backend, dtype), ("reference", dtype), ("reference", torch.float64)):
        inputs = [None if t is None else guarded(t.to(DEVICE, dtype).to(kind), layout) for t in tensors]
        results = function(name, *inputs)
        if not runs:
            upstream = torch.randn(results[0].shape, generator=generator, dtype=torch.float64).to(results[0].dtype)
        gradients = torch.autograd.grad(
            results[0], [t for t in inputs if t is not None], upstream.to(DEVICE, results[0].dtype)
        )
        runs.append((results, gradients))
    for i, (got, plain, exact) in enumerate(zip(*(r[0] for r in runs), strict=True)):
        assert_near(f"result {i}", "forward", dtype, got, plain, exact)
    for i, (got, plain, exact) in enumerate(zip(*(r[1] for r in runs), strict=True)):
        assert got.dtype == dtype
        if cancelled is not None:
            got, plain, exact = got.double() / cancelled[i], plain.double() / cancelled[i], torch.zeros_like(exact)
        assert_near(f"gradient {i}", "gradient", dtype, got, plain, exact)


def rows(count, width, seed):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def contrastive(batch, columns, width, offset, hard):
    query, key = rows(batch, width, 1), rows(columns, width, 2)
    # Real matches, so that the softmax is not flat; noisy ones, since plain torch loses digits where p is 1.
    key[offset : offset + batch] = query + 1.5 * rows(batch, width, 3)
    return [query, key, rows(columns, width, 4) if hard else None]


# batch, columns, width, offset, options. Tiles under the interpreter are 32 × 32 × 16.
INFO_NCE = {
    "one tile exactly": (32, 32, 16, 0, {}),
    "tiles exactly": (64, 96, 48, 0, {}),
    "one row, one column": (1, 1, 16, 0, {}),
    "one row, many columns": (1, 70, 24, 33, {}),
    "one row, one column, one feature": (1, 1, 1, 0, {}),
    "rows of one feature": (10, 10, 1, 0, {}),
    "less than a tile": (5, 13, 7, 6, {}),
    "a row more than a tile": (33, 33, 17, 0, {}),
    "a row less than a tile": (31, 63, 15, 1, {}),
    "ragged everything": (37, 71, 29, 13, {}),
    "last rank": (20, 80, 33, 60, {}),
    "middle rank across tiles": (40, 120, 32, 25, {}),
    "width 384": (9, 10, 384, 0, {}),
    "width 768": (5, 6, 768, 1, {}),
    "width 1000": (4, 5, 1000, 0, {}),
    "hard negatives": (16, 16, 24, 0, {"hard": True}),
    "hard negatives, ragged": (35, 67, 31, 9, {"hard": True}),
    "hard negatives, weighted": (35, 67, 31, 9, {"hard": True, "hard_negative_weight": 0.7}),
    "hard negatives, one row": (1, 1, 9, 0, {"hard": True, "hard_negative_weight": -1.0}),
    "margin": (33, 40, 20, 2, {"margin": 0.2}),
    "margin and hard negatives": (10, 12, 20, 2, {"margin": 0.2, "hard": True, "hard_negative_weight": 0.3}),
    "sum": (33, 40, 20, 2, {"reduction": "sum"}),
    "rows": (33, 40, 20, 2, {"reduction": "none"}),
    "rows, hard negatives": (40, 45, 20, 2, {"reduction": "none", "hard": True, "hard_negative_weight": 0.7}),
    "symmetric": (32, 32, 16, 0, {"symmetric": True}),
    "symmetric, ragged": (45, 45, 21, 0, {"symmetric": True, "margin": 0.1}),
    "symmetric rows": (37, 37, 19, 0, {"symmetric": True, "reduction": "none"}),
    "symmetric, one row": (1, 1, 19, 0, {"symmetric": True}),
    "cold": (33, 40, 20, 2, {"temperature": 0.01}),
    "cold, symmetric": (33, 33, 20, 0, {"temperature": 0.01, "symmetric": True}),
    "warm": (33, 40, 20, 2, {"temperature": 1.0}),
}


def run_info_nce(batch, columns, width, offset, options, backend, dtype, layout="rows"):
    options = {"temperature": 0.05, **options}
    tensors = contrastive(batch, columns, width, offset, options.pop("hard", False))

    def function(name, query, key, hard_negative):
        return info_nce(query, key, hard_negative=hard_negative, positive_offset=offset, backend=name, **options)

    cancelled = None
    if width == 1:  # cosines of single features are ±1: d cos / d row, up to 1 / ‖row‖, loses all to the projection
        cancelled = [(1 / (options["temperature"] * t)).norm() for t in tensors if t is not None]
    compare(function, tensors, dtype, backend, layout, cancelled=cancelled)


@BACKENDS
@pytest.mark.parametrize("case", INFO_NCE)
def test_info_nce(case, backend, dtype):
    run_info_nce(*INFO_NCE[case], backend, dtype)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("chunk", [32, 128])
@pytest.mark.parametrize("options", [{"hard": True}, {"symmetric": True}, {"reduction": "none"}], ids=str)
def test_info_nce_in_chunks(monkeypatch, backend, chunk, options):
    """Several chunks, the last one short: buffers are reused and gradients accumulate."""
    from fastprompt_kernels import info_nce_torch, info_nce_triton

    columns = 150 if not options.get("symmetric") else 140
    monkeypatch.setattr(info_nce_torch, "CHUNK_BYTES", chunk * columns * 4)
    monkeypatch.setattr(info_nce_triton, "TILE_BUFFER_BYTES", 1)
    monkeypatch.setattr(info_nce_triton, "MIN_CHUNK", chunk)
    run_info_nce(140, columns, 24, 0, options, backend, torch.float32)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_info_nce_layouts(backend, layout):
    run_info_nce(33, 40, 20, 2, {"hard": True}, backend, torch.float32, layout)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=st.integers(1, 34), extra=st.integers(0, 34), width=st.integers(1, 70), data=st.data())
def test_info_nce_any_shape(batch, extra, width, data):
    offset = data.draw(st.integers(0, extra))
    options = {"hard": data.draw(st.booleans()), "reduction": data.draw(st.sampled_from(["mean", "sum", "none"]))}
    run_info_nce(batch, batch + extra, width, offset, options, "triton", torch.float32)


def pooling(tokens, width, picks, deltas, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask_index = torch.randint(0, tokens, picks, generator=generator).to(DEVICE)
    delta_index = torch.randint(0, deltas, picks, generator=generator).to(DEVICE) if deltas else None
    return [rows(tokens, width, 5), rows(deltas, width, 6) if deltas else None], mask_index, delta_index


# tokens, width, sentences, deltas
POOL = [
    (tokens, width, count, deltas)
    for tokens, count in ((1, 1), (7, 3), (20, 33), (64, 16), (130, 60))
    for width, deltas in ((16, 2), (24, 0), (384, 5), (768, 1), (1000, 7), (3, 66))
]


@BACKENDS
@pytest.mark.parametrize("case", POOL, ids=str)
def test_mask_delta_pool(case, backend, dtype):
    tokens, width, count, deltas = case
    tensors, mask_index, delta_index = pooling(tokens, width, (count,), deltas)
    compare(
        lambda name, hidden, delta: (mask_delta_pool(hidden, mask_index, delta_index, delta, backend=name),),
        tensors, dtype, backend,
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_mask_delta_pool_layouts(backend, layout):
    tensors, mask_index, delta_index = pooling(20, 24, (33,), 3)
    compare(
        lambda name, hidden, delta: (mask_delta_pool(hidden, mask_index, delta_index, delta, backend=name),),
        tensors, torch.float32, backend, layout,
    )  # fmt: skip


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tokens=st.integers(1, 50), width=st.integers(1, 70), count=st.integers(1, 50), deltas=st.integers(1, 9))
def test_mask_delta_pool_any_shape(tokens, width, count, deltas):
    test_mask_delta_pool((tokens, width, count, deltas), "triton", torch.float32)


# tokens, width, (views, sentences), deltas, options
PROMPT = [
    (tokens, width, (views, count), deltas, options)
    for tokens, width, count, deltas in ((40, 16, 1, 2), (64, 24, 7, 3), (200, 33, 35, 66), (90, 384, 9, 0))
    for views, options in (
        (2, {}), (3, {}), (2, {"reduction": "sum", "margin": 0.1}), (3, {"reduction": "none", "hard_negative_weight": 0.5}),
        (2, {"symmetric": True}), (2, {"symmetric": True, "reduction": "none"}), (3, {"temperature": 0.01}),
    )
]  # fmt: skip


@BACKENDS
@pytest.mark.parametrize("case", PROMPT, ids=str)
def test_prompt_info_nce(case, backend, dtype):
    tokens, width, picks, deltas, options = case
    tensors, mask_index, delta_index = pooling(tokens, width, picks, deltas)
    options = {"temperature": 0.05, **options}

    def function(name, hidden, delta):
        return prompt_info_nce(hidden, mask_index, delta_index, delta, backend=name, **options)

    compare(function, tensors, dtype, backend)


# With one token all rows are equal, and with one feature all cosines are ±1: the gradient is zero, give or take rounding.
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tokens=st.integers(2, 90), width=st.integers(2, 50), count=st.integers(1, 40), deltas=st.integers(1, 9))
def test_prompt_info_nce_any_shape(tokens, width, count, deltas):
    test_prompt_info_nce((tokens, width, (2, count), deltas, {}), "triton", torch.float32)


# lengths, heads, head_dim, query rows (None: all), dropout
ATTENTION = [
    (lengths, heads, head_dim, query_rows, dropout_p)
    for lengths, query_rows in (
        ((1,), None),
        ((16,), None),
        ((3, 17, 1, 0, 40), None),
        ((128, 5), [0, 127, 130]),
        ((5, 9, 33), [2, 5, 13, 14, 46]),
        ((0, 31, 0, 2), [0, 1, 32]),
    )
    for heads, head_dim, dropout_p in ((1, 32, 0.0), (2, 64, 0.1), (1, 128, 0.0), (3, 24, 0.5), (2, 5, 0.1))
]


def run_attention(lengths, heads, head_dim, query_rows, dropout_p, backend, dtype, layout="rows", max_seqlen=None):
    starts = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE)
    tokens = sum(lengths)
    picked = None if query_rows is None else torch.tensor(query_rows, device=DEVICE)

    def shaped(count, seed):
        return rows(count, heads * head_dim, seed).view(count, heads, head_dim)

    tensors = [shaped(tokens if picked is None else len(picked), 1), shaped(tokens, 2), shaped(tokens, 3)]

    def function(name, query, key, value):
        return (
            packed_attention(
                query, key, value, starts, max_seqlen=max_seqlen or max(lengths), query_rows=picked,
                dropout_p=dropout_p, seed=11, backend=name,
            ),
        )  # fmt: skip

    compare(function, tensors, dtype, backend, layout)


@BACKENDS
@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_packed_attention(case, backend, dtype):
    run_attention(*case, backend, dtype)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_packed_attention_layouts(backend, layout):
    run_attention((3, 20), 2, 24, None, 0.1, backend, torch.float16, layout)


def test_packed_attention_backward_for_long_sequences_and_wide_heads():
    """16-bit beyond 64 × 128 leaves the one-kernel backward; so does any float32."""
    from fastprompt_kernels.packed_attention_triton import _fits

    assert _fits(torch.empty(1, 1, 64, dtype=torch.float16), 128)
    assert not _fits(torch.empty(1, 1, 128, dtype=torch.float16), 128)
    run_attention((70, 128), 1, 128, None, 0.1, "triton", torch.float16)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(0, 50), min_size=1, max_size=4).filter(any), head_dim=st.integers(1, 40))
def test_packed_attention_any_shape(lengths, head_dim):
    for dtype in (torch.float32, torch.float16):  # two backward designs
        run_attention(tuple(lengths), 2, head_dim, None, 0.2, "triton", dtype, max_seqlen=50)


# tokens, width, residual, dropout
DROPOUT_ADD = {
    "one value": (1, 1, True, 0.5),
    "one row": (1, 384, True, 0.1),
    "no residual": (37, 48, False, 0.1),
    "odd width": (37, 51, True, 0.1),
    "width 3, less than a random number": (20, 3, True, 0.3),
    "width 1000": (7, 1000, True, 0.1),
    "width 1024": (9, 1024, True, 0.1),
    "wider than a block": (2, 5000, True, 0.1),
    "several blocks of rows": (300, 40, True, 0.1),
    "nearly all": (30, 40, True, 0.99),
    "nearly none": (30, 40, True, 1e-4),
    "none": (30, 40, True, 0.0),
}


def run_dropout_add(tokens, width, residual, dropout_p, backend, dtype, layout="rows"):
    tensors = [rows(tokens, width, 1), rows(tokens, width, 2) if residual else None]

    def function(name, values, addend):
        return (dropout_add(values, addend, dropout_p=dropout_p, seed=5, backend=name),)

    compare(function, tensors, dtype, backend, layout)


@BACKENDS
@pytest.mark.parametrize("case", DROPOUT_ADD)
def test_dropout_add(case, backend, dtype):
    run_dropout_add(*DROPOUT_ADD[case], backend, dtype)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_dropout_add_layouts(backend, layout):
    run_dropout_add(33, 40, True, 0.1, backend, torch.float32, layout)


def test_dropout_add_in_chunks(monkeypatch):
    monkeypatch.setitem(dropout_add.__globals__, "CHUNK", 200)
    run_dropout_add(33, 40, True, 0.1, "torch", torch.float32)


@settings(max_examples=10, deadline=None)
@given(tokens=st.integers(0, 60), width=st.integers(1, 80), residual=st.booleans())
def test_dropout_add_any_shape(tokens, width, residual):
    run_dropout_add(tokens, width, residual, 0.3, "triton", torch.float32)
