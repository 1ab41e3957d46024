# SPDX-License-Identifier: Apache-2.0
"""Models, tokenizers and data for the tests. Nothing is fetched: models are packaged or made here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Kernels run compiled where there is a GPU, and under Triton's interpreter where there is none. Triton reads the
    # variable when it is imported, and transformers imports it.
    os.environ["TRITON_INTERPRET"] = "1"

from support import PACKAGED_MODEL, TEXTS
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    BertTokenizerFast,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)
from transformers import logging as transformers_logging

from fastprompt.model.encoder import resolve_model

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
# The same examples on every run, like every other seed here; `--hypothesis-profile=default` looks for new ones.
hypothesis.settings.register_profile("fixed", derandomize=True)
hypothesis.settings.load_profile("fixed")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data that FASTPROMPT_DATA names."""
    value = os.environ.get("FASTPROMPT_DATA")
    if not value:
        pytest.skip("FASTPROMPT_DATA is not set: no real data to test on")
    return Path(value)


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random masked-LM BERT of 2 layers, with the packaged model's vocabulary."""
    folder = tmp_path_factory.mktemp("tiny-bert")
    tokenizer = BertTokenizerFast.from_pretrained(resolve_model(PACKAGED_MODEL))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def headless_bert(tmp_path_factory: pytest.TempPathFactory, tiny_bert: str) -> str:
    """The encoder of ``tiny_bert`` without its masked-LM head."""
    folder = tmp_path_factory.mktemp("headless-bert")
    BertModel.from_pretrained(tiny_bert, add_pooling_layer=False).save_pretrained(folder)
    BertTokenizerFast.from_pretrained(tiny_bert).save_pretrained(folder)
    return str(folder)


def _save_roberta(folder: Path, backend: Tokenizer, config_class: Any, model_class: Any) -> str:
    mask = AddedToken("<mask>", lstrip=True, special=True)  # takes in the space before it, as RoBERTa's does
    backend.add_special_tokens([mask])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", cls_token="<s>", pad_token="<pad>", eos_token="</s>",
        sep_token="</s>", unk_token="<unk>", mask_token=mask,
    )  # fmt: skip
    torch.manual_seed(0)
    config = config_class(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=66, pad_token_id=1, bos_token_id=0, eos_token_id=2, type_vocab_size=1,
        initializer_range=0.2,
    )  # fmt: skip
    model_class(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_roberta(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random masked-LM RoBERTa of 2 layers with a byte-level BPE tokenizer trained on the tests' sentences."""
    folder = tmp_path_factory.mktemp("tiny-roberta")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    specials = ["<s>", "<pad>", "</s>", "<unk>", AddedToken("<mask>", lstrip=True, special=True)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    quoted = ["''" + " ''" + '""' + ' ""'] * 50  # so that neighbouring quotes merge, as in RoBERTa's vocabulary
    bpe.train_from_iterator([*TEXTS, *quoted, "This sentence : ' ' means . The sentence"], trainer)
    bpe.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return _save_roberta(folder, bpe, RobertaConfig, RobertaForMaskedLM)


@pytest.fixture(scope="session")
def tiny_xlm_roberta(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random XLM-RoBERTa of 2 layers with a sentence-piece (Unigram) tokenizer, special tokens among its pieces."""
    folder = tmp_path_factory.mktemp("tiny-xlm-roberta")
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    text = " ".join([*TEXTS, "This sentence : ' ' means . The what says"])
    pieces = sorted({f"▁{word}" for word in text.split()} | set(text.replace(" ", "")) | {"▁"})
    vocabulary = [*((token, 0.0) for token in specials), *((piece, -float(10 - len(piece))) for piece in pieces)]
    unigram = Tokenizer(models.Unigram(vocabulary, unk_id=3))
    unigram.normalizer = normalizers.NFKC()
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return _save_roberta(folder, unigram, XLMRobertaConfig, XLMRobertaForMaskedLM)


@pytest.fixture(scope="session")
def train_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A text file of 120 distinct sentences."""
    path = tmp_path_factory.mktemp("data") / "train.txt"
    lines = [f"{text.rstrip('.')} for the {n}th time." for n in range(10) for text in TEXTS]
    path.write_text("\n".join(lines) + "\n")
    return str(path)
