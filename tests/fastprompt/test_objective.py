# SPDX-License-Identifier: Apache-2.0
"""The objective against the reference: forward and every gradient, each kind of model, head and dtype."""

import pytest
import torch
from fastprompt_kernels import info_nce
from support import TEXTS
from transformers import AutoConfig, AutoModel, AutoTokenizer

import fastprompt.model.packed as packed_module
import fastprompt.objective as objective_module
import fastprompt.reference as reference_module
from fastprompt.config import EncoderConfig
from fastprompt.data.batching import ContrastiveBatch
from fastprompt.model import PromptEncoder
from fastprompt.objective import PromptObjective
from fastprompt.prompts import pack_prompts
from fastprompt.reference import reference_loss

# Error of loss and of each gradient, relative to the largest gradient, against the reference in float64.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5}
# In bf16 neither path is exact; ours may err by 2 (forward) and 3 (gradients) times the reference's own error in
# bf16, plus one rounding.
BF16_FORWARD, BF16_GRADIENT, BF16_FLOOR = 2.0, 3.0, 2**-8

TEMPLATES = {
    "tiny_bert": ('This sentence of "{sentence}" means [MASK].', 'This sentence : "{sentence}" means [MASK].'),
    "tiny_roberta": ("This sentence : ' {sentence} ' means [MASK].", "[MASK] : ' {sentence} '"),
    "tiny_xlm_roberta": ("This sentence : ' {sentence} ' means [MASK].", "[MASK] : ' {sentence} '"),
}
# A one-token sentence, an empty one, and one cut at the limit, among ordinary ones.
SENTENCES = [*TEXTS[:6], "a", "", "long " * 60]


def build(model, head, one_template=False, dtype=torch.float64):
    templates = TEMPLATES[model.rsplit("/", 1)[-1].rstrip("0").replace("-", "_")]
    torch.manual_seed(5)
    config = EncoderConfig(
        templates=templates[:1] if one_template else templates, head=head, head_at_evaluation=head == "mlm_transform"
    )
    encoder = PromptEncoder.from_pretrained(model, config)
    if head == "tanh_mlp":
        torch.nn.init.normal_(encoder.head.dense.bias)  # so that an empty sentence, h − delta = 0, has a direction
    return encoder.to(dtype).eval()  # dropout off: padded and packed paths draw different masks


def ours(encoder, views, delta, weight, **packing):
    prompts = encoder.tokenizer.prompts
    batch = pack_prompts(
        [prompts[min(v, len(prompts) - 1)] for v, view in enumerate(views) for _ in view],
        [ids for view in views for ids in view],
        delta=delta,
        **packing,
    )
    objective = PromptObjective(encoder, temperature=0.05, hard_negative_weight=weight)
    return objective(ContrastiveBatch(batch, len(views), (len(views[0]),)))


def loss_and_gradients(encoder, function):
    encoder.zero_grad()
    loss = function()
    loss.backward()
    gradients = {n: p.grad.double().clone() for n, p in encoder.named_parameters() if p.grad is not None}
    return loss.item(), gradients


def views_of(encoder, count, empty=True):
    limit = min(encoder.tokenizer.max_sentence_tokens, 49)  # the reference has deltas up to 49 tokens
    ids = encoder.tokenizer.encode([s for s in SENTENCES if s or empty], limit)[0]
    return [ids, ids[:1] + ids[2:] + ids[1:2], ids[::-1]][:count] if count == 3 else [ids, ids]


def error(got, want):
    """Largest relative difference of loss and of any gradient (norm), and that no gradient is missing."""
    assert got[1].keys() == want[1].keys()
    scale = max(g.norm() for g in want[1].values())
    gradient = max(((got[1][n] - want[1][n]).norm() / scale).item() for n in want[1])
    return abs(got[0] - want[0]) / max(1.0, abs(want[0])), gradient


@pytest.mark.parametrize("model", ["tiny_bert", "tiny_roberta", "tiny_xlm_roberta"])
@pytest.mark.parametrize("head", ["none", "tanh_mlp", "mlm_transform"])
@pytest.mark.parametrize("delta", [True, False], ids=["delta", "no delta"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_heads_and_models(request, model, head, delta, dtype):
    path = request.getfixturevalue(model)
    encoder, exact = build(path, head, dtype=dtype), build(path, head)
    # An empty sentence minus its delta is the zero vector, which has no cosine: without a head's bias leave it out.
    views = views_of(encoder, 2, empty=head == "tanh_mlp" or not delta)
    got = loss_and_gradients(encoder, lambda: ours(encoder, views, delta, 0.0))
    want = loss_and_gradients(exact, lambda: reference_loss(exact, views, delta=delta)[0])
    assert max(error(got, want)) < TOLERANCE[dtype]


@pytest.mark.parametrize("weight", [0.0, 1.5])
@pytest.mark.parametrize("one_template", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_triples(tiny_bert, weight, one_template, dtype):
    encoder, exact = (build(tiny_bert, "tanh_mlp", one_template, d) for d in (dtype, torch.float64))
    views = views_of(encoder, 3)
    got = loss_and_gradients(encoder, lambda: ours(encoder, views, True, weight))
    want = loss_and_gradients(exact, lambda: reference_loss(exact, views, delta=True, hard_negative_weight=weight)[0])
    assert max(error(got, want)) < TOLERANCE[dtype]


@pytest.mark.parametrize("model", ["tiny_bert", "tiny_roberta"])
@pytest.mark.parametrize("views", [2, 3])
def test_bf16_errs_no_more_than_the_reference_in_bf16(request, model, views):
    path = request.getfixturevalue(model)
    encoder, exact = build(path, "tanh_mlp", dtype=torch.bfloat16), build(path, "tanh_mlp")
    batch = views_of(encoder, views)
    want = loss_and_gradients(exact, lambda: reference_loss(exact, batch, delta=True)[0])
    got = error(loss_and_gradients(encoder, lambda: ours(encoder, batch, True, 0.0)), want)
    plain = error(loss_and_gradients(encoder, lambda: reference_loss(encoder, batch, delta=True)[0]), want)
    assert got[0] <= BF16_FORWARD * plain[0] + BF16_FLOOR
    assert got[1] <= BF16_GRADIENT * plain[1] + BF16_FLOOR


def test_the_shift_of_the_delta_matters(tiny_bert):
    """A delta at unshifted positions gives another loss, so that the tests above would notice."""
    encoder = build(tiny_bert, "none")
    ids = views_of(encoder, 2)
    prompts = [encoder.tokenizer.prompts[0]] * 9 + [encoder.tokenizer.prompts[1]] * 9
    batch = pack_prompts(prompts, [*ids[0], *ids[1]], delta=True)
    objective = PromptObjective(encoder, temperature=0.05)
    shifted = objective(ContrastiveBatch(batch, 2, (9,)))
    lengths = batch.cu_seqlens.diff().tolist()
    batch.position_ids.copy_(torch.cat([torch.arange(n) for n in lengths]))
    assert abs(objective(ContrastiveBatch(batch, 2, (9,))) - shifted) > 1e-3


def test_dropout_makes_two_views_of_one_template(tiny_bert):
    """With dropout on, the loss of identical views is that of two draws: positive, and of the reference's size."""
    encoder = build(tiny_bert, "none", one_template=True, dtype=torch.float32)
    ids = encoder.tokenizer.encode(TEXTS, 20)[0]
    encoder.eval()
    without = ours(encoder, [ids, ids], True, 0.0).item()
    encoder.train()
    torch.manual_seed(0)
    packed = torch.tensor([ours(encoder, [ids, ids], True, 0.0).item() for _ in range(60)])
    padded = torch.tensor([reference_loss(encoder, [ids, ids], delta=True)[0].item() for _ in range(60)])
    assert packed.mean() > without + 0.05
    # Two means of 60 draws: within 4 standard errors.
    spread = torch.sqrt((packed.var() + padded.var()) / 60)
    assert abs(packed.mean() - padded.mean()) < 4 * spread


@pytest.mark.parametrize("how", ["gradient_checkpointing", "micro_batches", "both"])
def test_recomputing_changes_nothing(tiny_bert, how):
    """With dropout on: what is computed again in the backward pass has the same masks."""
    encoder = build(tiny_bert, "tanh_mlp").train()
    views = views_of(encoder, 2)

    def run(count):
        torch.manual_seed(3)
        return ours(encoder, views, True, 0.0, num_micro_batches=count)

    count = 1 if how == "gradient_checkpointing" else 3
    # Micro-batches have dropout seeds of their own: only the recomputation is under test.
    want = (
        loss_and_gradients(encoder, lambda: run(count)) if count == 1 else without_recomputation(encoder, run, count)
    )
    encoder.packed.configure(gradient_checkpointing=how != "micro_batches")
    assert max(error(loss_and_gradients(encoder, lambda: run(count)), want)) < 1e-11


def without_recomputation(encoder, run, count):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_module, "_recomputed", lambda function, *arguments: function(*arguments))
        return loss_and_gradients(encoder, lambda: run(count))


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_micro_batches_change_nothing(tiny_bert, count, dtype):
    encoder, exact = (build(tiny_bert, "tanh_mlp", dtype=d) for d in (dtype, torch.float64))
    views = views_of(encoder, 3)
    got = loss_and_gradients(encoder, lambda: ours(encoder, views, True, 0.0, num_micro_batches=count))
    want = loss_and_gradients(exact, lambda: reference_loss(exact, views, delta=True)[0])
    assert max(error(got, want)) < TOLERANCE[dtype]


def test_frozen_deltas_are_constants(tiny_bert):
    """The loss stays, the gradient is that of the objective with the deltas detached."""
    encoder = build(tiny_bert, "tanh_mlp")
    views = views_of(encoder, 2)
    with pytest.MonkeyPatch.context() as patch:
        deltas = reference_module.reference_deltas
        patch.setattr(reference_module, "reference_deltas", lambda *a: deltas(*a).detach())
        want = loss_and_gradients(encoder, lambda: reference_loss(encoder, views, delta=True)[0])
    for count in (1, 3):
        packing = {"freeze_delta": True, "num_micro_batches": count}
        got = loss_and_gradients(encoder, lambda packing=packing: ours(encoder, views, True, 0.0, **packing))
        assert max(error(got, want)) < 1e-11
    trained = loss_and_gradients(encoder, lambda: ours(encoder, views, True, 0.0))
    assert error(got, trained)[1] > 1e-3


@pytest.mark.parametrize("heads", [1, 3, 6])
def test_any_head_size(tiny_bert, heads):
    hf_config = AutoConfig.from_pretrained(tiny_bert)
    hf_config.num_attention_heads, hf_config.hidden_size = heads, 30
    torch.manual_seed(1)
    backbone = AutoModel.from_config(hf_config, add_pooling_layer=False)
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    encoder = (
        PromptEncoder(backbone, tokenizer, EncoderConfig(templates=TEMPLATES["tiny_bert"]), None).double().eval()
    )
    views = views_of(encoder, 2, empty=False)
    got = loss_and_gradients(encoder, lambda: ours(encoder, views, True, 0.0))
    want = loss_and_gradients(encoder, lambda: reference_loss(encoder, views, delta=True)[0])
    assert max(error(got, want)) < 1e-11


def test_without_a_head_one_call_computes_the_tail(tiny_bert, monkeypatch):
    """One process and no head: prompt_info_nce. It equals pooling, then info_nce, which several ranks need."""
    encoder = build(tiny_bert, "none")
    views = [encoder.tokenizer.encode(TEXTS[:6], 32)[0]] * 2
    batch = pack_prompts([p for p in encoder.tokenizer.prompts for _ in range(6)], views[0] + views[1], delta=True)
    objective = PromptObjective(encoder, temperature=0.05)
    calls = []
    original = objective_module.prompt_info_nce
    monkeypatch.setattr(objective_module, "prompt_info_nce", lambda *a, **k: calls.append(a) or original(*a, **k))
    fused, gradients = loss_and_gradients(encoder, lambda: objective(ContrastiveBatch(batch, 2, (6,))))
    assert len(calls) == 1
    rows = encoder(batch, with_head=True)
    apart, expected = loss_and_gradients(
        encoder, lambda: info_nce(*encoder(batch, with_head=True).chunk(2), temperature=0.05).loss
    )
    assert rows.shape == (12, encoder.hf_config.hidden_size)
    assert fused == pytest.approx(apart, rel=1e-12)
    largest = max(g.abs().max() for g in expected.values())
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).abs().max() < 1e-11 * largest
