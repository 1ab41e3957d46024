# SPDX-License-Identifier: Apache-2.0
"""What every op promises besides its values: determinism, hard inputs, torch.compile, memory, errors, dispatch."""

import logging
import weakref

import pytest
import torch
from fastprompt_kernels import (
    dispatch,
    dropout_add,
    get_backend,
    info_nce,
    launcher,
    mask_delta_pool,
    packed_attention,
    prompt_info_nce,
    set_backend,
)
from kernel_checks import DEVICE
from torch.utils._python_dispatch import TorchDispatchMode

PATHS = pytest.mark.parametrize("backend", ["triton", "torch"])


def tensors(*shapes, dtype=torch.float32, seed=0, grad=True):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(s, generator=generator).to(DEVICE, dtype).requires_grad_(grad) for s in shapes]
    return made


def index(*values):
    return torch.tensor(values, device=DEVICE)


def calls(dtype=torch.float32):
    """Each op once, as (name, function of backend, inputs)."""
    query, key, hard, hidden, deltas = tensors((40, 24), (50, 24), (50, 24), (60, 24), (5, 24), dtype=dtype)
    states = tensors((30, 2, 16), (30, 2, 16), (30, 2, 16), dtype=dtype)
    picks, which, starts = (
        torch.arange(40, device=DEVICE) * 7 % 60,
        torch.arange(40, device=DEVICE) % 5,
        index(0, 11, 30),
    )
    square = {"temperature": 0.05, "symmetric": True}
    return {
        "info_nce": (
            lambda b: info_nce(query, key, temperature=0.05, hard_negative=hard, positive_offset=3, backend=b).loss,
            (query, key, hard),
        ),
        "info_nce rows": (
            lambda b: info_nce(query, key, temperature=0.05, reduction="none", backend=b).loss.square().sum(), (query, key),
        ),
        "info_nce symmetric": (lambda b: info_nce(query, key[:40], **square, backend=b).loss, (query, key)),
        "mask_delta_pool": (
            lambda b: mask_delta_pool(hidden, picks, which, deltas, backend=b).square().sum(), (hidden, deltas),
        ),
        "prompt_info_nce": (
            lambda b: prompt_info_nce(
                hidden, picks.view(2, 20), which.view(2, 20), deltas, temperature=0.05, backend=b
            ).loss,
            (hidden, deltas),
        ),
        "prompt_info_nce rows": (
            lambda b: prompt_info_nce(
                hidden, picks.view(2, 20), which.view(2, 20), deltas, temperature=0.05, reduction="none", backend=b
            ).loss.square().sum(),
            (hidden, deltas),
        ),
        "packed_attention": (
            lambda b: packed_attention(*states, starts, max_seqlen=19, dropout_p=0.2, seed=3, backend=b).square().sum(),
            tuple(states),
        ),
        "dropout_add": (
            lambda b: dropout_add(query, hard[:40], dropout_p=0.2, seed=3, backend=b).square().sum(), (query, hard),
        ),
    }  # fmt: skip


OPS = pytest.mark.parametrize("op", list(calls()))


@PATHS
@OPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_two_calls_are_bit_identical(op, backend, dtype):
    function, inputs = calls(dtype)[op]
    results = []
    for _ in range(2):
        loss = function(backend)
        results.append((loss, *torch.autograd.grad(loss, inputs)))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


@PATHS
@OPS
def test_backward_twice_and_unneeded_gradients(op, backend):
    function, inputs = calls()[op]
    loss = function(backend)
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(loss, inputs), strict=True):
        assert torch.equal(a, b)
    for i, chosen in enumerate(inputs):
        for j, t in enumerate(inputs):
            t.requires_grad_(i == j)
        (alone,) = torch.autograd.grad(function(backend), chosen)
        assert torch.equal(alone, first[i])
    with torch.no_grad():
        torch.testing.assert_close(function(backend), loss.detach())


@OPS
def test_compiles(op):
    """torch.compile sees one graph without breaks, and gets the same gradients."""
    function, inputs = calls()[op]
    want = function("torch")
    compiled = torch.compile(lambda: function("torch"), backend="aot_eager", fullgraph=True)
    got = compiled()
    assert torch.equal(got, want)
    for a, b in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_compiles_with_inductor():
    query, key = tensors((16, 8), (16, 8))

    def function(query, key):
        return info_nce(query * 2, key + 1, temperature=0.05).loss * 3

    got, want = torch.compile(function, fullgraph=True)(query, key), function(query, key)
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got, (query, key)), torch.autograd.grad(want, (query, key)), strict=True):
        torch.testing.assert_close(a, b)


@PATHS
def test_opcheck(backend):
    """Schema, fake implementations and autograd registration of every operator."""
    ops = torch.ops.fastprompt
    query, key, hidden, deltas = tensors((6, 8), (9, 8), (12, 8), (3, 8))
    states = tensors((7, 2, 8), (7, 2, 8), (7, 2, 8))
    picks, which, starts = index(3, 1, 11, 3), index(0, 2, 2, 1), index(0, 3, 7)
    row, column = torch.rand(6, device=DEVICE), torch.rand(0, device=DEVICE)
    scalars = (0.05, 1, 0.0, 0.0)
    samples = [
        (ops.info_nce_rows, (query, key, None, *scalars, False, backend)),
        (ops.info_nce_rows, (query, key[:6], None, 0.05, 0, 0.0, 0.1, True, backend)),
        (ops.info_nce_sum, (query, key, None, *scalars, True, True, False, backend)),
        (ops.mask_delta_pool, (hidden, picks, which, deltas, backend)),
        (ops.mask_delta_pool, (hidden, picks, None, None, backend)),
        (ops.prompt_info_nce_sum, (hidden, picks, which, deltas, 2, 0.05, 0.0, 0.0, backend)),
        (ops.prompt_info_nce_rows, (hidden, picks, which, deltas, 2, 0.05, 0.0, 0.0, False, backend)),
        (ops.packed_attention, (*states, starts, None, 4, 0.3, 0.1, 5, backend)),
        (ops.dropout_add, (query, query.detach() * 2, 0.1, 5, backend)),
        (ops.dropout_add, (query, None, 0.1, 5, backend)),
    ]
    fixed = [t.detach() for t in (query, key, hidden, *states)]
    query, key, hidden, *states = fixed
    samples += [
        (ops.info_nce_rows_backward, (row, column, query, key, None, row, row + 3, column, column, *scalars, True, True, False, backend)),
        (ops.project_rows, (query, query, query[:, :1].clone(), torch.ones((), device=DEVICE), backend)),
        (ops.scatter_rows, (hidden[:4], picks, which, None, 12, 3, torch.float32, True, backend)),
        (ops.packed_attention_backward, (states[0], *states, starts, None, 4, 0.3, 0.1, 5, backend)),
        (ops.dropout_add_backward, (query, torch.ones(query.shape, dtype=torch.int8, device=DEVICE), 0.1, 5, backend)),
        (ops.prompt_info_nce_rows_gradient, (row[:2], column, hidden, picks, None, None, row[:2], row[:2] + 3, column, column, 2, 0.05, 0.0, 0.0, backend)),
    ]  # fmt: skip
    for op, arguments in samples:
        torch.library.opcheck(op.default, arguments)


# Hard inputs.


@PATHS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("symmetric", [False, True], ids=["one way", "symmetric"])
@pytest.mark.parametrize("rows", ["zero", "some zero", "huge", "huge and zero", "identical", "opposite"])
def test_hard_rows_stay_finite(backend, dtype, symmetric, rows):
    """At τ = 0.01, where float16 logits would overflow at once."""
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(37, 40, generator=generator) for _ in range(2))
    if rows == "zero":
        query, key = torch.zeros_like(query), torch.zeros_like(key)
    elif rows == "some zero":
        query[3], key[5], key[3] = 0, 0, 0
    elif rows.startswith("huge"):
        query, key = (torch.where(t > 0, 1e4, -1e4) for t in (query, key))
        if "zero" in rows:
            query[0], key[1] = 0, 0
    elif rows == "identical":
        query = key = torch.ones_like(query)
    else:
        key = -query
    query, key = (t.to(DEVICE, dtype).requires_grad_() for t in (query, key))
    exact = [t.detach().double().requires_grad_() for t in (query, key)]
    for reduction in ("mean", "none"):
        loss = info_nce(
            query, key, temperature=0.01, symmetric=symmetric, reduction=reduction, backend=backend
        ).loss.mean()
        want = info_nce(*exact, temperature=0.01, symmetric=symmetric, backend="reference").loss
        torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
        for got, expected in zip(
            torch.autograd.grad(loss, (query, key)), torch.autograd.grad(want, exact, retain_graph=True), strict=True
        ):
            assert torch.isfinite(got).all()
            # float16 cannot hold gradients below 6e-8, nor better than to 3e-8
            torch.testing.assert_close(
                got.double(), expected, rtol=5e-3, atol=6e-8 + 5e-3 * expected.abs().max().item()
            )


@PATHS
def test_a_row_without_direction_gets_no_gradient(backend):
    query, key = tensors((4, 8), (4, 8))
    with torch.no_grad():
        query[2] = 0
    info_nce(query, key, temperature=0.05, backend=backend).loss.backward()
    assert (query.grad[2] == 0).all()
    assert (query.grad[1] != 0).any()


@PATHS
def test_an_almost_certain_positive_keeps_its_gradient(backend):
    query = torch.eye(4, 8, device=DEVICE).requires_grad_()
    key = torch.eye(4, 8, device=DEVICE) + 1e-3
    info_nce(query, key, temperature=0.05, reduction="sum", backend=backend).loss.backward()
    exact = query.detach().double().requires_grad_()
    info_nce(exact, key.double(), temperature=0.05, reduction="sum", backend="reference").loss.backward()
    assert (query.grad - exact.grad).norm() / exact.grad.norm() < 1e-4


@PATHS
def test_autocast_computes_in_float32(backend):
    query, key = tensors((16, 64), (16, 64))
    plain = info_nce(query, key, temperature=0.05, backend=backend).loss
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert torch.equal(info_nce(query, key, temperature=0.05, backend=backend).loss, plain)


def test_bf16_logits_are_those_of_float32():
    """On a CPU's bf16 units too: products of bf16 values summed and kept in float32."""
    query, key = tensors((300, 384), (300, 384), dtype=torch.bfloat16)
    low = info_nce(query, key, temperature=0.05, backend="torch")
    high = info_nce(query.float(), key.float(), temperature=0.05, backend="torch")
    torch.testing.assert_close(low.log_sum_exp, high.log_sum_exp, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(low.loss, high.loss, rtol=1e-6, atol=1e-5)


def test_float32_products_ignore_a_lower_process_wide_precision():
    query, key = tensors((300, 384), (300, 384))
    want = info_nce(query, key, temperature=0.05, backend="torch")
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        got = info_nce(query, key, temperature=0.05, backend="torch")
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    torch.testing.assert_close(got.log_sum_exp, want.log_sum_exp, rtol=1e-6, atol=1e-6)


@PATHS
def test_attention_keeps_its_dtype_under_autocast(backend):
    query, key, value = tensors((30, 2, 16), (30, 2, 16), (30, 2, 16))
    starts = index(0, 11, 30)
    plain = packed_attention(query, key, value, starts, max_seqlen=19, backend=backend)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert torch.equal(packed_attention(query, key, value, starts, max_seqlen=19, backend=backend), plain)


@PATHS
def test_indices_need_not_be_contiguous(backend):
    hidden, deltas = tensors((20, 8), (3, 8))
    picks = torch.randint(0, 20, (6, 2), device=DEVICE)
    which = index(1).expand(6)
    got = mask_delta_pool(hidden, picks[:, 0], which, deltas, backend=backend)
    assert torch.equal(got, hidden[picks[:, 0]] - deltas[1])
    pairs = torch.randint(0, 20, (2, 5, 2), device=DEVICE)
    loss = [
        prompt_info_nce(hidden, p, temperature=0.1, backend=backend).loss
        for p in (pairs[..., 0], pairs[..., 0].clone())
    ]
    assert torch.equal(*loss)
    states = tensors((3, 2, 8), (9, 2, 8), (9, 2, 8))
    rows, starts = index(1, 0, 4, 0, 8, 0)[::2], index(0, 7, 5, 7, 9, 7)[::2]
    out = [
        packed_attention(*states, s, max_seqlen=5, query_rows=r, dropout_p=0.4, seed=2, backend=backend)
        for r, s in ((rows, starts), (rows.clone(), starts.clone()))
    ]
    assert torch.equal(*out)


@PATHS
def test_transposed_rows(backend):
    query, key = tensors((24, 12), (24, 12))
    query, key = query.T, key.T
    loss = info_nce(query, key, temperature=0.05, backend=backend).loss
    want = info_nce(query, key, temperature=0.05, backend="reference").loss
    for a, b in zip(torch.autograd.grad(loss, (query, key)), torch.autograd.grad(want, (query, key)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


@PATHS
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_negative_at_all(backend, reduction):
    """An opposite positive at τ = 0.01 has a logit of −100, and exp(100) is infinite in float32."""
    (query,) = tensors((1, 8))
    key = (-query).detach().requires_grad_()
    loss = info_nce(query, key, temperature=0.01, reduction=reduction, backend=backend).loss.sum()
    assert loss == 0
    for gradient in torch.autograd.grad(loss, (query, key)):
        assert (gradient == 0).all()


@PATHS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_no_number_shows_in_the_loss(backend, bad):
    query, key = tensors((4, 8), (6, 8), grad=False)
    key[5, 2] = bad
    assert info_nce(query, key, temperature=0.05, backend=backend).loss.isnan()
    assert info_nce(query.requires_grad_(), key, temperature=0.05, backend=backend).loss.isnan()


def test_shared_deltas_are_summed_in_float32_and_bit_identically():
    hidden, deltas = tensors((600, 768), (700, 768), dtype=torch.bfloat16)
    picks, which = torch.arange(512, device=DEVICE), torch.zeros(512, dtype=torch.int64, device=DEVICE)
    upstream = torch.rand(512, 768, device=DEVICE).to(torch.bfloat16)
    out = mask_delta_pool(hidden, picks, which, deltas, backend="torch")
    first, second = (torch.autograd.grad(out, deltas, upstream, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    exact = -upstream.double().sum(0)
    assert ((first[0].double() - exact).abs() / exact.abs()).max() < 2**-8


# Dropout.


@pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
def test_dropout_depends_on_seed_and_place_only(backend):
    query, key, value = tensors((30, 2, 16), (30, 2, 16), (30, 2, 16))
    starts, rows = index(0, 11, 30), index(4, 10, 29)
    common = {"max_seqlen": 19, "dropout_p": 0.3, "backend": backend}
    out = packed_attention(query, key, value, starts, seed=3, **common)
    some = packed_attention(query[rows], key, value, starts, seed=3, query_rows=rows, **common)
    torch.testing.assert_close(some, out[rows])
    assert not torch.allclose(out, packed_attention(query, key, value, starts, seed=4, **common))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_dropout_add_draws_the_same_on_every_backend(backend):
    (values,) = tensors((50, 37))
    kept = [dropout_add(values, None, dropout_p=0.3, seed=3, backend=b) != 0 for b in (backend, "reference")]
    assert torch.equal(*kept)
    part = dropout_add(values[:20], None, dropout_p=0.3, seed=3, backend=backend)
    assert torch.equal(part != 0, kept[0][:20])
    assert not torch.equal(dropout_add(values, None, dropout_p=0.3, seed=4, backend=backend) != 0, kept[0])


def test_dropout_keeps_the_right_share_independently():
    from fastprompt_kernels.counter_rng import keep_mask, keep_scale

    mask = keep_mask(5, torch.arange(4000), 4, 32, 0.1).double()
    count = mask.numel()
    spread = (0.1 * 0.9 / count) ** 0.5
    assert abs(mask.mean().item() - 1 / keep_scale(0.1)) < 5 * spread
    centred = mask - mask.mean()
    for dim in range(3):  # neighbours in heads, rows and columns, and other seeds
        a, b = centred.narrow(dim, 0, mask.shape[dim] - 1), centred.narrow(dim, 1, mask.shape[dim] - 1)
        assert abs((a * b).mean().item()) < 5 * 0.09 / a.numel() ** 0.5
    other = keep_mask(6, torch.arange(4000), 4, 32, 0.1).double()
    assert abs((centred * (other - other.mean())).mean().item()) < 5 * 0.09 / count**0.5
    averaged = torch.stack([keep_mask(s, torch.arange(8), 2, 16, 0.5).double() for s in range(3000)]).mean(0)
    assert (averaged - 0.5).abs().max() < 6 * (0.25 / 3000) ** 0.5


# Memory and launches of the host code, on the meta device: what a GPU would be asked for.


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that are alive, and their peak."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.seen = 0, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, tuple | list) else [result]:
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                if storage._cdata not in self.seen:
                    self.seen[storage._cdata] = storage.nbytes()
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self.free, storage._cdata)
        self.peak = max(self.peak, self.live)
        return result

    def free(self, key):
        self.live -= self.seen.pop(key)


def launches_and_extra_bytes(batch, width, dtype, **options):
    query, key = (torch.empty(batch, width, dtype=dtype, device="meta", requires_grad=True) for _ in range(2))
    with launcher.recording("sm_90") as launches, LiveBytes() as memory:
        loss = info_nce(query, key, temperature=0.05, backend="triton", **options).loss
        torch.autograd.grad(loss, (query, key), torch.empty_like(loss))
    return launches, memory.peak - 2 * batch * width * dtype.itemsize  # less the two gradients


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{}, {"symmetric": True}, {"reduction": "none"}], ids=str)
def test_memory_at_65536_rows(dtype, options):
    """At most 1.5 GiB beyond inputs and gradients, where the logits alone are 16 GiB in float32."""
    _, extra = launches_and_extra_bytes(65536, 1024, dtype, **options)
    assert 2**28 < extra <= 1.5 * 2**30, f"{extra / 2**30:.2f} GiB"


def test_memory_does_not_grow_with_the_square():
    small, large = (launches_and_extra_bytes(b, 1024, torch.bfloat16)[1] for b in (65536, 131072))
    assert large < 2.0 * small


def test_three_products_a_chunk():
    launches, _ = launches_and_extra_bytes(256, 768, torch.bfloat16)
    names = [launch.kernel.__name__ for launch in launches]
    assert names.count("_info_nce_logits_fwd_kernel") == 1
    assert names.count("_info_nce_product_bwd_kernel") == 2
    assert len(names) == 9


# Dispatch.


@pytest.fixture
def default_backend():
    yield
    set_backend("auto")


def test_backend_by_default_and_by_name(default_backend, caplog):
    query, key = tensors((3, 8), (3, 8), seed=5)
    dispatch._log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="fastprompt_kernels.dispatch"):
        for _ in range(3):
            info_nce(query, key, temperature=0.05)
    assert [r.getMessage() for r in caplog.records] == [
        f"info_nce on {DEVICE} in torch.float32: {'torch' if DEVICE == 'cpu' else 'triton'} backend"
    ]
    set_backend("reference")
    assert get_backend() == "reference"
    assert info_nce(query, key, temperature=0.05).loss.grad_fn.name() != "_sum_implementationBackward"
    for bad in (set_backend, lambda name: info_nce(query, key, temperature=0.05, backend=name)):
        with pytest.raises(ValueError, match="no backend 'cuda'; choose one of auto, reference, torch, triton"):
            bad("cuda")


def test_triton_asked_for_where_it_cannot_run(monkeypatch):
    query, key = tensors((3, 8), (3, 8))
    with pytest.raises(ValueError, match=r"'triton' cannot serve this call: torch.float64"):
        info_nce(query.double(), key.double(), temperature=0.05, backend="triton")
    wide = tensors((4, 1, 130), (4, 1, 130), (4, 1, 130))
    with pytest.raises(ValueError, match="head_dim 130"):
        packed_attention(*wide, index(0, 4), max_seqlen=4, backend="triton")
    packed_attention(*wide, index(0, 4), max_seqlen=4)  # auto falls back
    monkeypatch.setattr(dispatch, "_interpreting", lambda: False)
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match="on a CPU"):
            info_nce(query, key, temperature=0.05, backend="triton")
    monkeypatch.setattr(dispatch, "TRITON_INSTALLED", False)
    with pytest.raises(ValueError, match="pip install triton"):
        info_nce(query, key, temperature=0.05, backend="triton")


def test_autotuning_prunes_by_shape():
    import triton

    configs = [triton.Config({"BLOCK_M": m, "BLOCK_N": n}) for m, n in ((128, 256), (128, 128), (64, 64))]
    kept = launcher.prune(configs, {"num_rows": 50, "num_columns": 100})
    assert [(c.kwargs["BLOCK_M"], c.kwargs["BLOCK_N"]) for c in kept] == [(64, 64)]
    assert launcher.prune(configs, {"num_rows": 4096, "num_columns": 4096}) == configs
    assert launcher.prune(configs[:1], {"num_rows": 5, "num_columns": 5}) == configs[:1]


def test_autotuning_is_off_by_default_and_can_be_switched_on():
    assert not launcher._autotune
    launcher.autotune()
    assert launcher._autotune
    launcher.autotune(False)


# Errors.


def other_dtype(t):
    return t.detach().half()


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda q, k, h: info_nce(q, other_dtype(k), temperature=1), ValueError, "one dtype: query is torch.float32, key is torch.float16"),
        (lambda q, k, h: info_nce(q, k.to("meta"), temperature=1), ValueError, "one device: query is on"),
        (lambda q, k, h: info_nce(q.long(), k.long(), temperature=1), ValueError, "query of a float dtype"),
        (lambda q, k, h: info_nce(q, k, temperature=float("nan")), ValueError, "temperature > 0"),
        (lambda q, k, h: info_nce(q, k, temperature=1, margin=-1), ValueError, "margin ≥ 0"),
        (lambda q, k, h: info_nce(q, k, temperature=1, hard_negative=k, hard_negative_weight=float("inf")), ValueError, "finite"),
        (lambda q, k, h: info_nce(q[:2], k, temperature=1, symmetric=True), ValueError, "as many queries as keys and no hard"),
        (lambda q, k, h: info_nce(q, k, temperature=1, symmetric=True, hard_negative=k), ValueError, "and hard negatives"),
        (lambda q, k, h: info_nce(q[:, :0], k[:, :0], temperature=1), ValueError, r"query \[B, D\]"),
        (lambda q, k, h: mask_delta_pool(q, index(0).int()), ValueError, "mask_index of dtype int64"),
        (lambda q, k, h: mask_delta_pool(q, index(0).to("meta")), ValueError, "one device: mask_index"),
        (lambda q, k, h: mask_delta_pool(q, index(0), index(0), other_dtype(k)), ValueError, "one dtype: hidden_states"),
        (lambda q, k, h: mask_delta_pool(q, index(-1)), IndexError, "mask_index reaches -1, but there are rows 0 … 3"),
        (lambda q, k, h: mask_delta_pool(q, index(0), index(4), k), IndexError, "delta_index reaches 4"),
        (lambda q, k, h: prompt_info_nce(q, index(0, 1), temperature=1), ValueError, r"mask_index \[V, B\]"),
        (lambda q, k, h: prompt_info_nce(q, index(0, 1)[None], temperature=1), ValueError, "2 or 3 views"),
        (lambda q, k, h: prompt_info_nce(q, index(0, 9).view(2, 1), temperature=1), IndexError, "reaches 9"),
        (lambda q, k, h: prompt_info_nce(q, index(0, 1, 2).view(3, 1), temperature=1, symmetric=True), ValueError, "two views"),
        (lambda q, k, h: prompt_info_nce(q, index(0, 1).view(2, 1), temperature=0), ValueError, "prompt_info_nce wants temperature"),
        (lambda q, k, h: prompt_info_nce(q, index(0, 1).view(2, 1), temperature=1, reduction="x"), ValueError, "not 'x'"),
        (lambda q, k, h: packed_attention(h[:3], h, h, index(0, 4), max_seqlen=4), ValueError, "as many queries as keys"),
        (lambda q, k, h: packed_attention(q, k, k, index(0, 4), max_seqlen=4), ValueError, r"\[T, heads, head_dim\]"),
        (lambda q, k, h: packed_attention(h, h, h, index(0), max_seqlen=4), ValueError, r"cu_seqlens \[S \+ 1\]"),
        (lambda q, k, h: packed_attention(h, h, h, index(0, 3), max_seqlen=4), ValueError, "ascend from 0 to 4"),
        (lambda q, k, h: packed_attention(h, h, h, index(0, 3, 2, 4), max_seqlen=4), ValueError, "ascend from 0 to 4"),
        (lambda q, k, h: packed_attention(h, h, h, index(0, 4), max_seqlen=3), ValueError, "has 4 tokens, max_seqlen says 3"),
        (lambda q, k, h: packed_attention(h, h, h, index(0, 4), max_seqlen=0), ValueError, "max_seqlen ≥ 1"),
        (lambda q, k, h: packed_attention(h, h, h, index(0, 4), max_seqlen=4, dropout_p=1.0), ValueError, "dropout_p < 1"),
        (lambda q, k, h: packed_attention(h[:2], h, h, index(0, 4), max_seqlen=4, query_rows=index(1)), ValueError, "one query a row"),
        (lambda q, k, h: packed_attention(h[:2], h, h, index(0, 4), max_seqlen=4, query_rows=index(1, 1)), ValueError, "each row once"),
        (lambda q, k, h: packed_attention(h[:2], h, h, index(0, 4), max_seqlen=4, query_rows=index(1, 4)), IndexError, "0 … 3"),
        (lambda q, k, h: dropout_add(q, k[:2], dropout_p=0.1, seed=0), ValueError, r"residual \[T, H\], got \(4, 8\) and \(2, 8\)"),
        (lambda q, k, h: dropout_add(q, other_dtype(k), dropout_p=0.1, seed=0), ValueError, "one dtype: hidden_states"),
        (lambda q, k, h: dropout_add(q, k, dropout_p=1.0, seed=0), ValueError, "dropout_add wants 0 ≤ dropout_p < 1"),
        (lambda q, k, h: dropout_add(q.new_zeros(1, 65537), None, dropout_p=0.1, seed=0), ValueError, "up to 65536 values"),
    ],
)  # fmt: skip
def test_errors(function, error, message):
    query, key = tensors((4, 8), (4, 8))
    (heads,) = tensors((4, 2, 8))
    with pytest.raises(error, match=message):
        function(query, key, heads)
