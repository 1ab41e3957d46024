# SPDX-License-Identifier: Apache-2.0
"""Which rows make up which step, and their packed batches.

The order of a run follows from (seed, epoch) alone, so that a resumed run needs no stored position but its step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from fastprompt.data.cache import TokenCache
from fastprompt.errors import FastpromptError
from fastprompt.prompts import PackedBatch, PromptTokens, pack_prompts

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ContrastiveBatch:
    """One rank's part of a batch.

    Attributes:
        prompts: the packed prompts of view 1, then view 2 (then the hard negatives), and their deltas.
        num_views: 2, or 3 with hard negatives.
        rows_per_rank: how many sentences each rank holds; their sum is the number of negatives' columns.
    """

    prompts: PackedBatch
    num_views: int
    rows_per_rank: tuple[int, ...]

    def to(self, device: torch.device | str) -> ContrastiveBatch:
        """The same batch on ``device``."""
        return replace(self, prompts=self.prompts.to(device))

    def pin_memory(self) -> ContrastiveBatch:
        """The same batch in page-locked memory."""
        return replace(self, prompts=self.prompts.pin_memory())


class BatchPlan:
    """Deals the rows of a file to steps, accumulation parts and ranks.

    A last, smaller batch is used as long as every part of it leaves each rank a sentence and each sentence a
    negative; otherwise its rows are left out of that epoch.

    Args:
        num_rows: rows of the file.
        global_batch_size: sentences of one optimizer step, over all ranks.
        accumulation_steps: parts of a step.
        world_size: number of ranks.
        seed: seed of the shuffle.

    Raises:
        FastpromptError: sizes that do not divide, or a file too small for one step.
    """

    def __init__(
        self, num_rows: int, global_batch_size: int, accumulation_steps: int, world_size: int, seed: int
    ) -> None:
        parts = accumulation_steps * world_size
        if global_batch_size % parts:
            raise FastpromptError(
                f"global_batch_size {global_batch_size} does not divide over {world_size} ranks × "
                f"{accumulation_steps} accumulation steps; use a multiple of {parts}"
            )
        self.num_rows = num_rows
        self.global_batch_size = global_batch_size
        self.accumulation_steps = accumulation_steps
        self.world_size = world_size
        self.seed = seed
        full, rest = divmod(num_rows, global_batch_size)
        smallest = accumulation_steps * max(world_size, 2)
        self.steps_per_epoch = full + (rest >= smallest)
        if not self.steps_per_epoch:
            raise FastpromptError(
                f"the training file has {num_rows} usable rows, one step needs at least {smallest}; "
                "add rows or lower gradient_accumulation_steps"
            )
        self._shuffled: tuple[int, Rows] = (-1, np.empty(0, np.int64))

    def total_steps(self, epochs: float, max_steps: int | None) -> int:
        """Optimizer steps of the whole run."""
        return max_steps if max_steps is not None else max(1, math.ceil(epochs * self.steps_per_epoch))

    def rows(self, step: int) -> list[list[Rows]]:
        """The rows of optimizer step ``step`` (from 0): ``[part][rank]``."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if self._shuffled[0] != epoch:
            self._shuffled = (epoch, np.random.default_rng((self.seed, epoch)).permutation(self.num_rows))
        start = index * self.global_batch_size
        batch = self._shuffled[1][start : start + self.global_batch_size]
        return [np.array_split(part, self.world_size) for part in np.array_split(batch, self.accumulation_steps)]


def collate(
    cache: TokenCache,
    parts: list[Rows],
    rank: int,
    prompts: tuple[PromptTokens, ...],
    *,
    delta: bool,
    freeze_delta: bool = False,
    tokens_per_micro_batch: int | None = None,
) -> ContrastiveBatch:
    """Pack this rank's rows: view v uses column v (the only column twice, when there is one) and template v.

    The last template serves any further views, as in the published code.

    Args:
        cache: the sentences.
        parts: the rows of every rank.
        rank: whose rows to pack.
        prompts: the tokenised templates.
        delta, freeze_delta: see ``pack_prompts``.
        tokens_per_micro_batch: no micro-batch holds more tokens; at least twice the longest prompt. All ranks cut
            their rows into equally many (and none into more than it has prompts).
    """
    num_views = max(2, cache.columns)
    views = [(min(v, cache.columns - 1), prompts[min(v, len(prompts) - 1)]) for v in range(num_views)]
    rows = parts[rank]
    count = 1
    if tokens_per_micro_batch is not None:
        trained = delta and not freeze_delta
        count = max(_micro_batches(cache, part, views, trained, tokens_per_micro_batch) for part in parts)
        count = min(count, num_views * min(len(part) for part in parts))
    packed = pack_prompts(
        [prompt for _, prompt in views for _ in rows],
        [cache[int(row), column] for column, _ in views for row in rows],
        delta=delta,
        freeze_delta=freeze_delta,
        num_micro_batches=count,
    )
    return ContrastiveBatch(packed, num_views, tuple(len(part) for part in parts))


def _micro_batches(
    cache: TokenCache, rows: Rows, views: list[tuple[int, PromptTokens]], deltas: bool, budget: int
) -> int:
    """How many micro-batches the rows need, so that none exceeds the budget."""
    tokens, longest = 0, 0
    kinds: set[tuple[PromptTokens, int]] = set()
    for column, prompt in views:
        lengths = cache.lengths(rows, column)
        tokens += int(lengths.sum()) + len(prompt) * len(rows)
        longest = max(longest, int(lengths.max()) + len(prompt))
        if deltas:
            kinds.update((prompt, length) for length in lengths.tolist())
    tokens += sum(len(prompt) for prompt, _ in kinds)
    # Cuts fall between sequences, up to one of them beyond an even share.
    return -(-tokens // (budget - longest))
