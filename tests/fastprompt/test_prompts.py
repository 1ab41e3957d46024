# SPDX-License-Identifier: Apache-2.0
"""Templates, their tokens, deltas, and what sentences may contain."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import PACKAGED_MODEL, TEXTS
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fastprompt.errors import FastpromptError
from fastprompt.model.encoder import resolve_model
from fastprompt.prompts import PromptTokenizer, Template, pack_prompts

PLAIN = 'This sentence of "{sentence}" means [MASK].'
SPACED = "This sentence : ' {sentence} ' means [MASK]."


@pytest.fixture(scope="session")
def bert():
    return AutoTokenizer.from_pretrained(resolve_model(PACKAGED_MODEL))


@pytest.fixture(scope="session")
def roberta(tiny_roberta):
    return AutoTokenizer.from_pretrained(tiny_roberta)


@pytest.fixture(scope="session")
def xlm_roberta(tiny_xlm_roberta):
    return AutoTokenizer.from_pretrained(tiny_xlm_roberta)


@pytest.mark.parametrize(
    ("published", "plain"),
    [
        ('*cls*_This_sentence_of_"*sent_0*"_means*mask*.*sep+*', PLAIN),
        ("*cls*_This_sentence_:_'_*sent_0*_'_means*mask*.*sep+*", SPACED),
        ("*cls**sent_0*_means_*mask*.*sep*", "{sentence} means [MASK]."),
    ],
)
def test_published_syntax(published, plain):
    assert Template.parse(published) == Template.parse(plain)
    assert str(Template.parse(published)) == plain


@pytest.mark.parametrize("text", [PLAIN, SPACED, "[MASK] is the topic of {sentence}", "{sentence} [MASK]"])
def test_text_survives_parsing(text):
    assert str(Template.parse(text)) == text
    assert Template.parse(str(Template.parse(text))) == Template.parse(text)


@pytest.mark.parametrize(
    ("name", "published", "raw", "plain"),
    [
        (
            "bert",
            '*cls*_This_sentence_of_"*sent_0*"_means*mask*.*sep+*',
            'This sentence of "{sentence}" means[MASK].',
            PLAIN,
        ),
        (
            "roberta",
            "*cls*_This_sentence_:_'_*sent_0*_'_means*mask*.*sep+*",
            "This sentence : ' {sentence} ' means<mask>.",
            SPACED,
        ),
    ],
)
def test_the_published_spelling_has_the_tokens_of_the_plain_one(request, name, published, raw, plain):
    tokenizer = request.getfixturevalue(name)
    prompts = [PromptTokenizer(tokenizer, [text], 64).prompts for text in (published, raw, plain)]
    assert prompts[0] == prompts[1] == prompts[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("This means [MASK].", r"has 0 places for the sentence, it needs exactly one \{sentence\}"),
        ("{sentence} and {sentence} mean [MASK].", "has 2 places for the sentence"),
        ('This sentence of "{sentence}" means.', r"has 0 mask tokens, it needs exactly one \[MASK\]"),
        ("{sentence} means [MASK] or <mask>.", "has 2 mask tokens"),
        ("*cls*_*sent_0*_means*label*_*mask*.*sep+*", r"has the marker '\*label\*'"),
    ],
)
def test_bad_templates(text, message):
    with pytest.raises(FastpromptError, match=message):
        Template.parse(text)


def test_template_longer_than_the_model(bert):
    with pytest.raises(FastpromptError, match="has 63 tokens and the model 60 positions.*shorten the template"):
        PromptTokenizer(bert, ["word " * 60 + "{sentence} [MASK]"], 60)


def test_tokenizer_without_a_mask_token():
    words = Tokenizer(models.WordLevel({"a": 0, "[CLS]": 1, "[SEP]": 2}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, cls_token="[CLS]", sep_token="[SEP]")
    with pytest.raises(FastpromptError, match="has no mask token.*use a masked language model"):
        PromptTokenizer(tokenizer, [PLAIN], 64)
    assert PromptTokenizer(tokenizer, [], 64).prompts[0].prefix == (1,)  # mean pooling needs none


def test_slow_tokenizer_is_refused():
    class Slow:
        is_fast = False
        name_or_path = "slow"

    with pytest.raises(FastpromptError, match="no fast"):
        PromptTokenizer(Slow(), [PLAIN], 64)


@pytest.mark.parametrize("text", ["It is '{sentence}' so [MASK].", 'It is "{sentence}" so [MASK].'])
def test_tokens_that_merge_across_the_sentence_are_refused(roberta, bert, text):
    with pytest.raises(FastpromptError, match="merges tokens across the place of the sentence.*put a space"):
        PromptTokenizer(roberta, [text], 64)
    PromptTokenizer(bert, [text], 64)


def test_templates_must_agree_on_the_space(roberta, bert):
    with pytest.raises(FastpromptError, match="differ in the space before"):
        PromptTokenizer(roberta, [SPACED, "The word: {sentence} means [MASK].", "({sentence} is [MASK]"], 64)
    PromptTokenizer(bert, ["The word: {sentence} means [MASK].", "({sentence} is [MASK]"], 64)


@pytest.mark.parametrize(("name", "template"), [("bert", PLAIN), ("roberta", SPACED), ("xlm_roberta", SPACED)])
def test_tokens_are_those_of_the_whole_text(name, template, request):
    tokenizer = request.getfixturevalue(name)
    prompts = PromptTokenizer(tokenizer, [template], 64)
    prompt = prompts.prompts[0]
    for text in TEXTS:
        (ids,), _ = prompts.encode([text], 32)
        whole = template.replace("{sentence}", text).replace("[MASK]", tokenizer.mask_token)
        got = [*prompt.prefix, *ids, *prompt.suffix]
        assert got == tokenizer(whole)["input_ids"]
        assert got[prompt.mask_position(len(ids))] == tokenizer.mask_token_id


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm_roberta"])
@pytest.mark.parametrize(
    "text",
    [
        "a [MASK] b",
        "a <mask> b",
        "＜mask＞",
        "[MASK]",
        "<mask>",
        "x[SEP]y</s>z",
        "[CLS] <s> [PAD] <pad>",
        "{sentence}",
    ],
)
def test_special_tokens_in_a_sentence_are_plain_text(name, text, request):
    tokenizer = request.getfixturevalue(name)
    prompts = PromptTokenizer(tokenizer, [PLAIN if name == "bert" else SPACED], 64)
    (ids,), _ = prompts.encode([text], 32)
    assert len(ids)
    assert not set(ids.tolist()) & set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_unusual_sentences(name, request):
    tokenizer = request.getfixturevalue(name)
    prompts = PromptTokenizer(tokenizer, [PLAIN if name == "bert" else SPACED], 64)
    sentences = ["", "   ", "Ελληνικά και 日本語", "👍🏽 emoji 🎉", "long " * 400, "tab\tand\nnewline"]
    ids, cut = prompts.encode(sentences, 32)
    assert [len(ids[0]), len(ids[1])] == [0, 0]
    assert all(0 < len(row) <= 32 for row in ids[2:])
    assert cut >= 1
    assert len(ids[4]) == 32


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=40), min_size=1, max_size=6))
def test_any_text_gives_one_mask_a_prompt(bert, texts):
    prompts = PromptTokenizer(bert, [PLAIN], 64)
    ids, _ = prompts.encode(texts, 32)
    batch = pack_prompts([prompts.prompts[0]] * len(ids), ids, delta=True)
    is_mask = (batch.input_ids == bert.mask_token_id).nonzero().squeeze(1)
    assert is_mask.tolist() == batch.mask_index.tolist()


def test_packing_and_deltas(bert):
    prompts = PromptTokenizer(bert, [PLAIN, "[MASK] is the meaning of {sentence} here"], 64)
    first, second = prompts.prompts
    ids = [np.array([5, 6, 7]), np.array([8]), np.array([9, 10, 11]), np.array([], dtype=np.int32)]
    batch = pack_prompts([first, first, second, first], ids, delta=True)
    assert batch.num_sentences == 4
    assert batch.delta_index.tolist() == [0, 1, 2, 3]
    again = pack_prompts([first] * 3, [ids[0], ids[1], ids[0]], delta=True)
    assert again.delta_index.tolist() == [0, 1, 0]  # one delta for each distinct (template, length)
    lengths = batch.cu_seqlens.diff().tolist()
    # Sentences longest first, then the deltas; ``second`` has two tokens less than ``first``.
    sentences = [len(first) + 3, len(first) + 1, len(second) + 3, len(first)]
    assert lengths == [*sentences, *[len(first)] * 3, len(second)]
    assert batch.sequence_index.tolist() == [0, 1, 2, 3, 4, 5, 7, 6]  # where the sentences lie, then the deltas
    turned = pack_prompts([first] * 3, [ids[3], ids[0], ids[1]], delta=False)
    assert turned.sequence_index.tolist() == [2, 0, 1]
    assert [part.tokens for part in batch.micro_batches] == [(0, sum(lengths))]
    assert batch.micro_batches[0].max_seqlen == max(lengths)
    start = int(batch.cu_seqlens[4])  # the delta of (first, 3 tokens)
    tokens = batch.input_ids[start : start + len(first)].tolist()
    positions = batch.position_ids[start : start + len(first)].tolist()
    assert tokens == [*first.prefix, *first.suffix]
    p = len(first.prefix)
    assert positions == [*range(p), *range(p + 3, len(first) + 3)]
    # A mask before the sentence is not shifted, what follows the sentence is.
    start = int(batch.cu_seqlens[7])
    assert batch.position_ids[start + second.mask_index] == second.mask_index
    assert batch.input_ids[batch.mask_index].tolist() == [bert.mask_token_id] * 8
    plain = pack_prompts([first], ids[:1], delta=False)
    assert plain.delta_index is None
    assert len(plain.cu_seqlens) == 2


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=40),
    count=st.integers(1, 8),
    delta=st.booleans(),
    freeze=st.booleans(),
)
def test_micro_batches(bert, lengths, count, delta, freeze):
    """They cover every sequence once, none is empty, and what they hold differs by less than the longest prompt."""
    prompt = PromptTokenizer(bert, [PLAIN], 64).prompts[0]
    sentences = [np.full(n, 7) for n in lengths]
    count = min(count, len(sentences))
    batch = pack_prompts(
        [prompt] * len(sentences), sentences, delta=delta, freeze_delta=freeze, num_micro_batches=count
    )
    parts = batch.micro_batches
    assert [part.frozen for part in parts] == [False] * count + [True] * (delta and freeze)
    assert parts[0].sequences[0] == 0
    assert parts[-1].sequences[1] == len(batch.cu_seqlens) - 1
    assert all(a.sequences[1] == b.sequences[0] for a, b in pairwise(parts))
    for part in parts:
        bounds = batch.cu_seqlens[part.sequences[0] : part.sequences[1] + 1]
        assert part.tokens == (bounds[0], bounds[-1])
        assert part.max_seqlen == bounds.diff().max()
    tokens = [part.tokens[1] - part.tokens[0] for part in parts if not part.frozen]
    if min(tokens) > max(len(prompt) + n for n in lengths):  # not where every sequence is a part of its own
        assert max(tokens) - min(tokens) <= 2 * (len(prompt) + max(lengths))
