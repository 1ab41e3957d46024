# SPDX-License-Identifier: Apache-2.0
"""Templates, their tokens, and packed batches of prompts with their delta sequences.

A prompt is ``[CLS] prefix sentence suffix [SEP]`` with exactly one mask token, in the prefix or in the suffix. The
*delta* of a (template, n) is ``[CLS] prefix suffix [SEP]`` with every position after the prefix shifted by n, the
number of the sentence's tokens (PromptBERT, section 4.3). Prefix, sentence and suffix are tokenised apart, so that
the template's tokens are the same whatever the sentence is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from fastprompt.errors import FastpromptError

SENTENCE = "{sentence}"
MASK = "[MASK]"
MASK_SPELLINGS = (MASK, "<mask>")
EXAMPLE = f'This sentence of "{SENTENCE}" means {MASK}.'

TokenIds = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Template:
    """A template's text around the sentence, with the mask token spelt ``[MASK]``.

    ``prefix`` ends in no white space; ``space_before`` tells that the sentence follows a space (byte-level and
    sentence-piece tokenizers make the space part of the sentence's first token).
    """

    prefix: str
    suffix: str
    space_before: bool

    @classmethod
    def parse(cls, text: str, mask_token: str = MASK) -> Template:
        """Read ``This sentence of "{sentence}" means [MASK].`` or the published ``*cls*_This_…*mask*.*sep+*``.

        ``mask_token`` is the tokenizer's own spelling, accepted beside ``[MASK]`` and ``<mask>``.

        Raises:
            FastpromptError: no or several ``{sentence}``, no or several masks, an unknown ``*marker*``.
        """
        plain = _from_published_syntax(text) if "*sent" in text or "*mask*" in text else text
        for spelling in {*MASK_SPELLINGS, mask_token}:
            plain = plain.replace(spelling, MASK)
        if plain.count(SENTENCE) != 1:
            raise FastpromptError(
                f"template {text!r} has {plain.count(SENTENCE)} places for the sentence, it needs exactly one "
                f"{SENTENCE}, as in {EXAMPLE!r}"
            )
        if plain.count(MASK) != 1:
            raise FastpromptError(
                f"template {text!r} has {plain.count(MASK)} mask tokens, it needs exactly one {MASK}, "
                f"as in {EXAMPLE!r}"
            )
        before, after = plain.split(SENTENCE)
        prefix = before.rstrip()
        return cls(prefix.lstrip(), after.rstrip(), space_before=bool(prefix) and prefix != before)

    def __str__(self) -> str:
        return f"{self.prefix}{' ' if self.space_before else ''}{SENTENCE}{self.suffix}"


def _from_published_syntax(text: str) -> str:
    plain = text.replace("_", " ").replace("*sent 0*", SENTENCE)
    # Published templates write means*mask*: mask tokens take in the space before them, so that both have the same
    # tokens, and one spelling lets templates be compared.
    plain = re.sub(r"(?<=\w)\*mask\*", f" {MASK}", plain).replace("*mask*", MASK)
    plain = re.sub(r"\*(cls|sep\+?)\*", "", plain)
    unknown = re.search(r"\*[^* ]*\*", plain)
    if unknown:
        raise FastpromptError(
            f"template {text!r} has the marker {unknown.group()!r}; known are *cls*, *sent_0*, *mask*, *sep*, *sep+*"
        )
    return plain.strip()


@dataclass(frozen=True)
class PromptTokens:
    """A tokenised template: ``prefix`` starts with [CLS], ``suffix`` ends in [SEP]."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    mask_index: int
    """Index of the mask token in ``prefix + suffix``."""

    def __len__(self) -> int:
        return len(self.prefix) + len(self.suffix)

    def mask_position(self, sentence_length: int) -> int:
        """Index of the mask token in the prompt of a sentence of ``sentence_length`` tokens."""
        return self.mask_index + (sentence_length if self.mask_index >= len(self.prefix) else 0)


class PromptTokenizer:
    """Tokenises templates and sentences with a transformers fast tokenizer.

    Args:
        tokenizer: a fast tokenizer with [CLS] and [SEP] tokens (and a mask token when there are templates).
        templates: the templates, or none for plain ``[CLS] sentence [SEP]`` input (mean and cls pooling).
        max_positions: how many positions the model has.

    Raises:
        FastpromptError: a slow tokenizer, a missing special token, a template that this tokenizer cannot split
            cleanly or that leaves no room for a sentence.
    """

    def __init__(self, tokenizer: Any, templates: Sequence[str], max_positions: int) -> None:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        if not getattr(tokenizer, "is_fast", False):
            raise FastpromptError(
                f"the tokenizer of {name!r} has no fast (Rust) version; "
                "save it with a tokenizer.json, for instance through transformers.AutoTokenizer"
            )
        for role in ("cls", "sep", *(("mask",) if templates else ())):
            if getattr(tokenizer, f"{role}_token_id") is None:
                raise FastpromptError(
                    f"the tokenizer of {name!r} has no {role} token, which prompts need; "
                    "use a masked language model such as BERT or RoBERTa"
                )
        self.hf_tokenizer = tokenizer
        self.max_positions = max_positions
        self._backend = self._copy_backend(encode_special_tokens=False)
        # In a sentence, "[MASK]" or "[SEP]" is text like any other: it must not create a second special token.
        self._sentence_backend = self._copy_backend(encode_special_tokens=True)
        self._special_ids = sorted(set(tokenizer.all_special_ids) - {tokenizer.unk_token_id})
        self.templates = tuple(Template.parse(text, tokenizer.mask_token) for text in templates)
        self.space_before = self._common_space()
        if self.templates:
            self.prompts = tuple(self._tokenize_template(template) for template in self.templates)
        else:
            self.prompts = (PromptTokens((tokenizer.cls_token_id,), (tokenizer.sep_token_id,), 0),)

    @property
    def max_sentence_tokens(self) -> int:
        """The longest sentence, in tokens, that fits into the model with every template."""
        return self.max_positions - max(len(prompt) for prompt in self.prompts)

    @property
    def fingerprint(self) -> str:
        """Text that changes whenever the tokens of a sentence may change."""
        return f"{self._sentence_backend.to_str()}|space_before={self.space_before}"

    def encode(self, sentences: Sequence[str], max_tokens: int) -> tuple[list[TokenIds], int]:
        """Tokens of each sentence without special tokens, cut to ``max_tokens``, and how many were cut."""
        texts = [sentence.strip() for sentence in sentences]
        if self.space_before:
            texts = [" " + text if text else "" for text in texts]
        encodings = self._sentence_backend.encode_batch_fast(texts, add_special_tokens=False)
        rows: list[TokenIds] = [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]
        if rows and np.isin(np.concatenate(rows), self._special_ids).any():
            rows = [self._without_specials(row) for row in rows]
        cut = sum(len(row) > max_tokens for row in rows)
        return [row[:max_tokens] for row in rows], cut

    def _without_specials(self, row: TokenIds) -> TokenIds:
        # Sentence-piece vocabularies hold "<mask>" as an ordinary piece, which no setting switches off.
        unknown = self.hf_tokenizer.unk_token_id
        special = np.isin(row, self._special_ids)
        return row[~special] if unknown is None else np.where(special, np.int32(unknown), row)

    def _copy_backend(self, *, encode_special_tokens: bool) -> Tokenizer:
        backend = Tokenizer.from_str(self.hf_tokenizer.backend_tokenizer.to_str())
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = encode_special_tokens
        return backend

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _common_space(self) -> bool:
        if self._ids(" a") == self._ids("a"):  # WordPiece: a leading space changes nothing
            return False
        spaces = {template.space_before for template in self.templates}
        if len(spaces) > 1:
            listed = " and ".join(repr(str(template)) for template in self.templates)
            raise FastpromptError(
                f"templates {listed} differ in the space before {SENTENCE}, which changes the sentence's tokens "
                "with this tokenizer; put a space there in all of them or in none"
            )
        return spaces == {True}

    def _tokenize_template(self, template: Template) -> PromptTokens:
        tokenizer = self.hf_tokenizer
        prefix_text = template.prefix.replace(MASK, tokenizer.mask_token)
        suffix_text = template.suffix.replace(MASK, tokenizer.mask_token)
        prefix, suffix = self._ids(prefix_text), self._ids(suffix_text)
        if self._ids(prefix_text + suffix_text) != prefix + suffix:
            raise FastpromptError(
                f"template {str(template)!r}: this tokenizer merges tokens across the place of the sentence, so that "
                f"the template alone does not have the template's tokens; put a space on both sides of {SENTENCE}"
            )
        prompt = PromptTokens(
            (tokenizer.cls_token_id, *prefix),
            (*suffix, tokenizer.sep_token_id),
            1 + (prefix + suffix).index(tokenizer.mask_token_id),
        )
        if len(prompt) >= self.max_positions:
            raise FastpromptError(
                f"template {str(template)!r} has {len(prompt)} tokens and the model {self.max_positions} positions, "
                "which leaves none for a sentence; shorten the template"
            )
        return prompt


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that go through the encoder together: a run of a packed batch. All bounds are plain integers.

    Attributes:
        sequences: (first, one past the last) sequence.
        tokens: (first, one past the last) token.
        max_seqlen: the longest of its sequences.
        frozen: no gradient is wanted of them.
    """

    sequences: tuple[int, int]
    tokens: tuple[int, int]
    max_seqlen: int
    frozen: bool


@dataclass(frozen=True)
class PackedBatch:
    """Sequences laid end to end, without padding: N sentences, longest first, then the K deltas that they need.

    Similar lengths lie side by side, so that a run of sequences (a micro-batch, or what attention pads together on a
    CPU) wastes little.

    Attributes:
        input_ids: [T], int64.
        position_ids: [T], int64, from 0 (a model's own position offset is the model's business).
        cu_seqlens: [N + K + 1], int64; sequence s is tokens cu_seqlens[s] : cu_seqlens[s + 1].
        mask_index: [N + K], int64, ascending; the token of each sequence's mask.
        sequence_index: [N + K], int64; which sequence each sentence is, in the order given, then each delta.
        delta_index: [N], int64, which of the K deltas belongs to each sentence; None when there are no deltas.
        num_sentences: N.
        micro_batches: what goes through the encoder together.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    mask_index: Tensor
    sequence_index: Tensor
    delta_index: Tensor | None
    num_sentences: int
    micro_batches: tuple[MicroBatch, ...]

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch on ``device``."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> PackedBatch:
        """The same batch in page-locked memory, from where a GPU fetches it while it computes."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> PackedBatch:
        changed: dict[str, Any] = {
            field.name: function(value)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **changed)


def pack_prompts(
    prompts: Sequence[PromptTokens],
    sentences: Sequence[TokenIds],
    *,
    delta: bool,
    freeze_delta: bool = False,
    num_micro_batches: int = 1,
) -> PackedBatch:
    """Lay the sentences, sentence i in ``prompts[i]``, and the distinct deltas of the batch end to end.

    Args:
        prompts: N tokenised templates, one a sentence.
        sentences: N arrays of token ids; an empty one is an empty sentence.
        delta: whether to add one delta sequence for each distinct (template, sentence length).
        freeze_delta: whether the deltas are a micro-batch of their own, of which no gradient is wanted.
        num_micro_batches: how many micro-batches of about equal numbers of tokens to cut the sequences into; the
            frozen deltas not counted.

    Raises:
        ValueError: fewer sequences than micro-batches.
    """
    deltas: dict[tuple[PromptTokens, int], int] = {}
    delta_index: list[int] = []
    sequences: list[tuple[PromptTokens, TokenIds | None, int]] = []
    for prompt, sentence in zip(prompts, sentences, strict=True):
        sequences.append((prompt, sentence, len(sentence)))
        if delta:
            delta_index.append(deltas.setdefault((prompt, len(sentence)), len(deltas)))
    sequences += [(prompt, None, n) for prompt, n in deltas]
    lengths = np.array([len(p) + (0 if ids is None else n) for p, ids, n in sequences], dtype=np.int64)
    num_sentences = len(sentences)
    # Stable: equal lengths keep their order, so a batch is laid out in one way only.
    order = np.lexsort((np.arange(len(lengths)), -lengths, np.arange(len(lengths)) >= num_sentences))
    input_ids: list[TokenIds | tuple[int, ...]] = []
    position_ids: list[TokenIds] = []
    mask_offsets = np.empty(len(order), dtype=np.int64)
    for place, number in enumerate(order):
        prompt, ids, n = sequences[number]
        positions = np.arange(lengths[number])
        if ids is None:
            positions[len(prompt.prefix) :] += n
        position_ids.append(positions)
        input_ids += [prompt.prefix, prompt.suffix] if ids is None else [prompt.prefix, ids, prompt.suffix]
        mask_offsets[place] = prompt.mask_index if ids is None else prompt.mask_position(n)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths[order])])
    sequence_index = np.empty(len(order), dtype=np.int64)
    sequence_index[order] = np.arange(len(order))
    return PackedBatch(
        input_ids=torch.from_numpy(np.concatenate(input_ids, dtype=np.int64)),
        position_ids=torch.from_numpy(np.concatenate(position_ids, dtype=np.int64)),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        mask_index=torch.from_numpy(cu_seqlens[:-1] + mask_offsets),
        sequence_index=torch.from_numpy(sequence_index),
        delta_index=torch.tensor(delta_index, dtype=torch.int64) if delta else None,
        num_sentences=num_sentences,
        micro_batches=_cut(cu_seqlens, num_sentences if freeze_delta else len(order), num_micro_batches),
    )


def _cut(cu_seqlens: npt.NDArray[np.int64], trained: int, count: int) -> tuple[MicroBatch, ...]:
    """``count`` runs of the first ``trained`` sequences, cut where the tokens are even, and one of the others."""

    def run(first: int, last: int, frozen: bool) -> MicroBatch:
        bounds = cu_seqlens[first : last + 1]
        return MicroBatch((first, last), (int(bounds[0]), int(bounds[-1])), int(np.diff(bounds).max()), frozen)

    if trained < count:
        raise ValueError(f"{trained} sequences cannot be cut into {count} micro-batches")
    shares = cu_seqlens[trained] * np.arange(1, count) / count
    # Every micro-batch gets a sequence: ranks that gather weights together run equally many.
    cuts = [0, *np.searchsorted(cu_seqlens[: trained + 1], shares), trained]
    for i in range(1, count):
        cuts[i] = min(max(int(cuts[i]), cuts[i - 1] + 1), trained - (count - i))
    parts = [run(first, last, False) for first, last in pairwise(cuts)]
    if trained + 1 < len(cu_seqlens):
        parts.append(run(trained, len(cu_seqlens) - 1, True))
    return tuple(parts)
