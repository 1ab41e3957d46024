# SPDX-License-Identifier: Apache-2.0
"""Loading, encoding, saving; what is refused."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support import PACKAGED_MODEL, TEXTS
from transformers import AutoModel, AutoModelForMaskedLM, GPT2Config

from fastprompt.config import EncoderConfig
from fastprompt.errors import FastpromptError
from fastprompt.model import PromptEncoder
from fastprompt.model.encoder import add_final_period, reconcile, resolve_model, saved_config

SPACED = "This sentence : ' {sentence} ' means [MASK]."
TEMPLATE = {
    "tiny_bert": 'This sentence of "{sentence}" means [MASK].',
    "tiny_roberta": SPACED,
    "tiny_xlm_roberta": SPACED,
}


@pytest.mark.parametrize("name", ["tiny_bert", "tiny_roberta", "tiny_xlm_roberta"])
@pytest.mark.parametrize("delta", [False, True])
def test_vectors_do_not_depend_on_the_batch(request, name, delta):
    config = EncoderConfig(templates=(TEMPLATE[name],), delta=delta)
    encoder = PromptEncoder.from_pretrained(request.getfixturevalue(name), config)
    assert encoder.training  # and left so: dropout must be off inside encode only
    together = encoder.encode(TEXTS, batch_size=64)
    assert encoder.training
    alone = np.concatenate([encoder.encode([text]) for text in TEXTS])
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(together[::-1], encoder.encode(TEXTS[::-1], batch_size=64))


@pytest.mark.parametrize("name", ["tiny_bert", "tiny_roberta", "tiny_xlm_roberta"])
def test_mean_and_cls_pooling(request, name):
    path = request.getfixturevalue(name)
    encoder = PromptEncoder.from_pretrained(path, reconcile(path, {"pooling": "mean"}))
    tokenizer = encoder.tokenizer.hf_tokenizer
    model = AutoModel.from_pretrained(path).eval()
    for text in TEXTS[:4]:
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        np.testing.assert_allclose(encoder.encode([text, "x"])[0], hidden.mean(0), atol=1e-5)
        cls = PromptEncoder.from_pretrained(path, reconcile(path, {"pooling": "cls"}))
        np.testing.assert_allclose(cls.encode([text, "x"])[0], hidden[0], atol=1e-5)


@pytest.mark.parametrize("head", ["none", "tanh_mlp", "mlm_transform"])
@pytest.mark.parametrize("name", ["tiny_bert", "tiny_roberta", "tiny_xlm_roberta"])
def test_saved_and_loaded(request, tmp_path, name, head):
    path = request.getfixturevalue(name)
    config = EncoderConfig(
        templates=(TEMPLATE[name], SPACED), head=head, delta=True, head_at_evaluation=head != "none"
    )
    encoder = PromptEncoder.from_pretrained(path, config)
    encoder.save_pretrained(tmp_path)
    again = PromptEncoder.from_pretrained(tmp_path)
    assert again.config == encoder.config == saved_config(tmp_path)
    np.testing.assert_array_equal(again.encode(TEXTS), encoder.encode(TEXTS))
    # transformers reads the same folder, and the tensors are those of its own model, to the bit.
    theirs, info = AutoModel.from_pretrained(tmp_path, add_pooling_layer=False, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, encoder.backbone.state_dict()[key])


@pytest.mark.parametrize("name", ["tiny_bert", "tiny_roberta", "tiny_xlm_roberta"])
def test_mlm_transform_starts_from_the_pretrained_head(request, name):
    path = request.getfixturevalue(name)
    config = EncoderConfig(templates=(SPACED,), head="mlm_transform", head_at_evaluation=True, final_period=False)
    encoder = PromptEncoder.from_pretrained(path, config)
    model = AutoModelForMaskedLM.from_pretrained(path).eval()
    tokenizer = encoder.tokenizer.hf_tokenizer
    ids = tokenizer(SPACED.format(sentence=TEXTS[0]).replace("[MASK]", tokenizer.mask_token), return_tensors="pt")
    with torch.no_grad():
        hidden = model.base_model(**ids).last_hidden_state[ids["input_ids"] == tokenizer.mask_token_id]
        if name == "tiny_bert":
            expected = model.cls.predictions.transform(hidden)
        else:
            expected = model.lm_head.layer_norm(torch.nn.functional.gelu(model.lm_head.dense(hidden)))
    # Two orders of the same float32 sums: a few roundings of values up to 2.
    np.testing.assert_allclose(encoder.encode([TEXTS[0]]), expected, atol=5e-6)


def test_mlm_transform_needs_a_pretrained_head(headless_bert):
    with pytest.raises(FastpromptError, match="no pretrained masked-LM head.*use head tanh_mlp"):
        PromptEncoder.from_pretrained(headless_bert, EncoderConfig(head="mlm_transform", head_at_evaluation=True))


def test_long_sentences_are_cut_with_a_count(tiny_bert, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("fastprompt"), "propagate", True)
    encoder = PromptEncoder.from_pretrained(tiny_bert)
    vectors = encoder.encode(["word " * 500, "short", "other " * 500])
    assert np.isfinite(vectors).all()
    assert "2 sentences were cut to the model's limit of" in caplog.text


def test_unusual_sentences_have_finite_vectors(tiny_bert):
    encoder = PromptEncoder.from_pretrained(tiny_bert)
    vectors = encoder.encode(["", "[MASK]", "日本語", "👍🏽", "a [MASK] b [SEP]"])
    assert vectors.shape == (5, 32)
    assert np.isfinite(vectors).all()
    assert encoder.encode([]).shape == (0, 32)


def test_final_period():
    cases = {"a": "a.", "a.": "a.", "a?": "a?", 'a"': 'a"', "a'": "a'", "a!": "a!.", " a ": "a.", "": ""}
    assert {text: add_final_period(text) for text in cases} == cases


def test_dropout_setting(tiny_bert):
    encoder = PromptEncoder.from_pretrained(tiny_bert, dropout=0.0)
    assert encoder.hf_config.hidden_dropout_prob == encoder.hf_config.attention_probs_dropout_prob == 0.0
    assert all(m.p == 0.0 for m in encoder.modules() if isinstance(m, torch.nn.Dropout))


def test_settings_that_contradict_the_checkpoint_are_refused(tiny_bert, tmp_path):
    PromptEncoder.from_pretrained(tiny_bert).save_pretrained(tmp_path)
    published = '*cls*_This_sentence_of_"*sent_0*"_means*mask*.*sep+*'
    assert reconcile(tmp_path, {"pooling": "mask", "templates": (published,), "delta": False}) == saved_config(
        tmp_path
    )
    for asked, words in [
        ({"pooling": "mean"}, "pooling = 'mask' of itself .* but 'mean' was asked for"),
        ({"delta": True}, "delta = False"),
        ({"final_period": False}, "final_period = True"),
        ({"templates": ("{sentence} [MASK]",)}, "templates = "),
        ({"head": "tanh_mlp"}, "head = 'none'"),
    ]:
        with pytest.raises(FastpromptError, match=words + ".*leave that flag out"):
            reconcile(tmp_path, asked)


def test_models_that_cannot_be_loaded(tmp_path, tiny_bert):
    with pytest.raises(FastpromptError, match="cannot load a model from .*nowhere.*hub name"):
        PromptEncoder.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(FastpromptError, match="the package 'no_such_package' is not installed; pip install no-such"):
        PromptEncoder.from_pretrained("package:no_such_package/model")
    GPT2Config(n_layer=1).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(FastpromptError, match="type 'gpt2'; supported are bert, roberta, xlm-roberta"):
        PromptEncoder.from_pretrained(tmp_path / "gpt2")
    shutil.copytree(tiny_bert, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(FastpromptError, match="cannot load a model from"):
        PromptEncoder.from_pretrained(tmp_path / "cut")


def test_packaged_model_is_found():
    folder = Path(resolve_model(PACKAGED_MODEL))
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 384
    assert "embeddings.word_embeddings.weight" in load_file(folder / "model.safetensors")
