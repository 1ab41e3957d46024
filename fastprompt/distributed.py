# SPDX-License-Identifier: Apache-2.0
"""Ranks, and the differentiable gather behind global negatives. One process needs no process group."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

Embeddings = npt.NDArray[np.floating[Any]]


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier()


def all_reduce_sum(values: Tensor) -> Tensor:
    """The sum of ``values`` over all ranks, on every rank; no gradient."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def all_gather_objects(value: Any) -> list[Any]:
    """``value`` of every rank, in rank order."""
    gathered: list[Any] = [value]
    if world_size() > 1:
        gathered = [None] * world_size()
        dist.all_gather_object(gathered, value)
    return gathered


class _GatherRows(torch.autograd.Function):
    """All ranks' rows in rank order; the gradient of a row is the sum of what every rank computed for it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, rows_per_rank: tuple[int, ...]) -> Tensor:
        ctx.rows_per_rank = rows_per_rank
        # Collectives want equal shapes: the last batch may differ by one row between ranks.
        padded = rows.new_zeros(max(rows_per_rank), rows.shape[1])
        padded[: rows.shape[0]] = rows
        gathered = [torch.empty_like(padded) for _ in rows_per_rank]
        dist.all_gather(gathered, padded)
        return torch.cat([part[:count] for part, count in zip(gathered, rows_per_rank, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        largest = max(ctx.rows_per_rank)
        parts = []
        for part in gradient.split(ctx.rows_per_rank):
            padded = part.new_zeros(largest, part.shape[1])
            padded[: part.shape[0]] = part
            parts.append(padded)
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts)
        return own[: ctx.rows_per_rank[dist.get_rank()]], None


def gather_rows(rows: Tensor, rows_per_rank: Sequence[int]) -> Tensor:
    """Concatenate every rank's rows, differentiably.

    Args:
        rows: [rows_per_rank[rank], D] of this rank.
        rows_per_rank: how many rows each rank brings.

    Returns:
        [sum(rows_per_rank), D], equal on every rank. In the backward pass a rank's rows receive the *sum* over
        ranks of the gradients, so that each rank differentiating its own share of the loss gives the whole gradient.
    """
    if world_size() == 1:
        return rows
    gathered: Tensor = _GatherRows.apply(rows, tuple(rows_per_rank))
    return gathered


def encode_over_ranks(encode: Callable[[Sequence[str]], Embeddings], sentences: Sequence[str]) -> Embeddings:
    """``encode(sentences)`` with the work dealt to the ranks; every rank returns all rows.

    Every rank encodes the same number of sentences (the last one repeated where they do not divide), because under
    ZeRO stage 3 a forward pass is a collective operation.
    """
    world = world_size()
    if world == 1:
        return encode(sentences)
    share = -(-len(sentences) // world)
    padded = [*sentences, *[sentences[-1]] * (share * world - len(sentences))]
    gathered = all_gather_objects(encode(padded[rank() :: world]))
    return np.stack(gathered, axis=1).reshape(share * world, -1)[: len(sentences)]
