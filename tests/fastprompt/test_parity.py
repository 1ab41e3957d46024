# SPDX-License-Identifier: Apache-2.0
"""Both our objective and our reference against values of the published PromptBERT code, in float64."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support import PACKAGED_MODEL

from fastprompt.config import EncoderConfig
from fastprompt.data.batching import ContrastiveBatch
from fastprompt.model.encoder import PromptEncoder, resolve_model
from fastprompt.objective import PromptObjective
from fastprompt.prompts import pack_prompts
from fastprompt.reference import reference_deltas, reference_embeddings, reference_loss

TRAINING = (
    "unsup_two_templates_delta",
    "unsup_one_template_delta",
    "unsup_two_templates_no_delta",
    "sup_pairs_delta",
    "sup_triples_delta_w0",
    "sup_triples_delta_w1",
)
PUBLISHED_NAMES = {"bert.": "backbone.", "mlp.": "head."}


@pytest.fixture(scope="session")
def cases(data_dir):
    return json.loads((data_dir / "parity" / "promptbert_parity.json").read_text())["cases"]


def test_every_case_is_tested(cases):
    assert set(cases) == {*TRAINING, "embed_no_delta", "embed_delta"}


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("path", ["objective", "reference"])
def test_training_case(cases, name, path):
    case = cases[name]
    encoder = PromptEncoder.from_pretrained(
        PACKAGED_MODEL, EncoderConfig(templates=tuple(case["templates"]), head="tanh_mlp")
    ).double()
    encoder.eval()  # no dropout
    pooler = load_file(f"{resolve_model(PACKAGED_MODEL)}/model.safetensors")
    encoder.head.dense.load_state_dict({key: pooler[f"pooler.dense.{key}"] for key in ("weight", "bias")})
    columns = list(zip(*case["sentences"], strict=True))
    views = [encoder.tokenizer.encode(column, case["max_sentence_tokens"])[0] for column in columns]
    settings = {"temperature": case["temperature"], "hard_negative_weight": case["hard_negative_weight"]}
    expected = case["expected"]
    if path == "reference":
        loss, logits = reference_loss(encoder, views, delta=case["delta"], **settings)
        first = expected["logits_first_row"]
        np.testing.assert_allclose(logits[0, : len(first)].detach(), first, rtol=1e-9)
    else:
        prompts = encoder.tokenizer.prompts
        batch = pack_prompts(
            [prompts[min(v, len(prompts) - 1)] for v, view in enumerate(views) for _ in view],
            [ids for view in views for ids in view],
            delta=case["delta"],
        )
        loss = PromptObjective(encoder, **settings)(ContrastiveBatch(batch, len(views), (len(views[0]),)))
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-9)
    gradients = {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}
    total = torch.sqrt(sum(g.pow(2).sum() for g in gradients.values()))
    assert total.item() == pytest.approx(expected["grad_norm"], rel=1e-7)
    for published, norm in expected["grad_norms"].items():
        for theirs, ours in PUBLISHED_NAMES.items():
            published = published.replace(theirs, ours)
        assert gradients[published].norm().item() == pytest.approx(norm, rel=1e-7)


@pytest.mark.parametrize("name", ["embed_no_delta", "embed_delta"])
def test_embedding_case(cases, name):
    case = cases[name]
    config = EncoderConfig(templates=(case["template"],), delta=case["delta"], final_period=False)
    encoder = PromptEncoder.from_pretrained(PACKAGED_MODEL, config).double()
    expected = np.array(case["expected_first8"])
    np.testing.assert_allclose(encoder.encode(case["sentences"], batch_size=3)[:, :8], expected, rtol=0, atol=1e-8)
    encoder.eval()
    ids, _ = encoder.tokenizer.encode(case["sentences"], 400)
    prompt = encoder.tokenizer.prompts[0]
    deltas = reference_deltas(encoder, prompt, 60) if case["delta"] else None
    reference = reference_embeddings(encoder, prompt, ids, deltas, with_head=False)
    np.testing.assert_allclose(reference[:, :8].detach(), expected, rtol=0, atol=1e-8)
