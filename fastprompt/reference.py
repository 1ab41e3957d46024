# SPDX-License-Identifier: Apache-2.0
"""The published objective, padded, eager and obvious: the oracle of the tests and the baseline of the benches.

It follows PromptBERT (Jiang et al., 2022) step by step and shares nothing with the fast path but the tokenised
templates: every view is padded to the batch's longest prompt, a delta is computed for every length from 0 to
``num_deltas − 1`` whether the batch has it or not, cosines are built by broadcasting, and the loss is a plain
cross-entropy. Only tests and benches may import it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastprompt.model.encoder import PromptEncoder
from fastprompt.model.heads import MLMTransform
from fastprompt.prompts import PromptTokens, TokenIds


def reference_loss(
    encoder: PromptEncoder,
    views: Sequence[Sequence[TokenIds]],
    *,
    delta: bool,
    temperature: float = 0.05,
    hard_negative_weight: float = 0.0,
    num_deltas: int = 50,
) -> tuple[Tensor, Tensor]:
    """The loss of one process on a whole batch.

    Args:
        encoder: the model; its dropout is active or not as its training mode says.
        views: 2 or 3 lists of B token-id arrays.
        delta: subtract the delta.
        temperature: τ.
        hard_negative_weight: added to the logits of a sentence's own hard negative.
        num_deltas: lengths for which a delta is computed (50 in the published training code).

    Returns:
        (loss, scalar; logits, [B, B] or [B, 2B]).
    """
    prompts = encoder.tokenizer.prompts
    # One forward pass of the deltas a template: views that share a template share the dropout of their deltas.
    tables = [reference_deltas(encoder, prompt, num_deltas) if delta else None for prompt in prompts]
    z = []
    for v, view in enumerate(views):
        template = min(v, len(prompts) - 1)
        z.append(reference_embeddings(encoder, prompts[template], view, tables[template], with_head=True))
    logits = F.cosine_similarity(z[0].unsqueeze(1), z[1].unsqueeze(0), dim=-1) / temperature
    if len(z) == 3:
        negatives = F.cosine_similarity(z[0].unsqueeze(1), z[2].unsqueeze(0), dim=-1) / temperature
        own = torch.eye(len(negatives), dtype=negatives.dtype, device=negatives.device)
        logits = torch.cat([logits, negatives + hard_negative_weight * own], dim=1)
    labels = torch.arange(len(logits), device=logits.device)
    return F.cross_entropy(logits, labels), logits


def reference_embeddings(
    encoder: PromptEncoder,
    prompt: PromptTokens,
    sentences: Sequence[TokenIds],
    deltas: Tensor | None,
    *,
    with_head: bool,
) -> Tensor:
    """[B, H]: head([MASK] state − delta of the sentence's length), for sentences in one template.

    ``deltas`` is what ``reference_deltas`` returns for the template, or None for no subtraction.
    """
    prefix, suffix = list(prompt.prefix), list(prompt.suffix)
    full = [prefix + [int(i) for i in sentence] + suffix for sentence in sentences]
    longest = max(len(ids) for ids in full)
    pad = encoder.hf_config.pad_token_id
    device = next(encoder.parameters()).device
    input_ids = torch.tensor([ids + [pad] * (longest - len(ids)) for ids in full], device=device)
    attention_mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in full], device=device)
    mask_rows = torch.tensor([prompt.mask_position(len(sentence)) for sentence in sentences], device=device)
    # No position ids: transformers' own default serves as the check on ours.
    hidden = encoder.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    rows = _transform(encoder.head, hidden[torch.arange(len(full), device=device), mask_rows])
    if deltas is not None:
        rows = rows - deltas[torch.tensor([len(sentence) for sentence in sentences], device=device)]
    if with_head and encoder.head is not None and not isinstance(encoder.head, MLMTransform):
        rows = encoder.head(rows)
    return rows


def reference_deltas(encoder: PromptEncoder, prompt: PromptTokens, count: int) -> Tensor:
    """[count, H]: the template alone, its part after the sentence's place shifted by 0 … count − 1 positions."""
    device = next(encoder.parameters()).device
    ids = torch.tensor([*prompt.prefix, *prompt.suffix], device=device).repeat(count, 1)
    first = 0 if encoder.hf_config.model_type == "bert" else encoder.hf_config.pad_token_id + 1
    positions = torch.arange(first, first + ids.shape[1], device=device).repeat(count, 1)
    positions[:, len(prompt.prefix) :] += torch.arange(count, device=device).unsqueeze(1)
    # The mask is spelled out: without one, transformers ≥ 5.25 takes the jump in the positions for the beginning of
    # another packed sequence and lets neither side see the other.
    mask = torch.ones_like(ids)
    outputs = encoder.backbone(input_ids=ids, attention_mask=mask, position_ids=positions)
    hidden: Tensor = outputs.last_hidden_state
    return _transform(encoder.head, hidden[:, prompt.mask_index])


def _transform(head: nn.Module | None, rows: Tensor) -> Tensor:
    """The masked-LM transform acts before the subtraction, any other head after it."""
    return head(rows) if isinstance(head, MLMTransform) else rows
