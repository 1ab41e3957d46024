# SPDX-License-Identifier: Apache-2.0
"""Retrieval of a sentence's neighbour, and the geometry of the space: scores that need no human judgement."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fastprompt.data.reading import RowReader
from fastprompt.errors import FastpromptError
from fastprompt.evaluation import Embeddings, Encode, unit_rows

_BLOCK_ROWS = 1024


def load_pairs(path: str) -> list[tuple[str, str]]:
    """The pairs of a two-column file (any format of ``RowReader``), without those of a sentence with itself.

    Raises:
        FastpromptError: what ``RowReader`` raises, a file of another number of columns, or one without a pair.
    """
    reader = RowReader(path)
    if reader.columns != 2:
        raise FastpromptError(f"{path}: {reader.columns} column(s); held-out neighbours are two columns of sentences")
    pairs = [(first, second) for first, second in reader if first != second]
    if not pairs:
        raise FastpromptError(f"{path}: every pair is a sentence and itself; give pairs of different sentences")
    return pairs


def evaluate_neighbours(encode: Encode, pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    """How well a sentence finds its neighbour among all sentences of ``pairs``.

    Returns:
        ``mrr`` (mean reciprocal rank) and ``recall_at_10`` of the second sentence of each pair, ranked by cosine
        with the first among all sentences but the first itself; ``alignment``, ``uniformity`` and ``anisotropy``.
    """
    sentences = list(dict.fromkeys(sentence for pair in pairs for sentence in pair))
    row = {sentence: index for index, sentence in enumerate(sentences)}
    unit = unit_rows(encode(sentences))
    first = np.array([row[a] for a, _ in pairs])
    second = np.array([row[b] for _, b in pairs])
    ranks = neighbour_ranks(unit, first, second)
    return {
        "mrr": float(np.mean(1 / ranks)),
        "recall_at_10": float(np.mean(ranks <= 10)),
        "alignment": alignment(unit[first], unit[second]),
        "uniformity": uniformity(unit),
        "anisotropy": anisotropy(unit),
    }


def neighbour_ranks(
    unit: Embeddings, first: npt.NDArray[np.integer], second: npt.NDArray[np.integer]
) -> npt.NDArray[np.int64]:
    """Rank, from 1, of row ``second[i]`` among all rows but ``first[i]``, by cosine with it. Ties count against."""
    ranks = []
    for start in range(0, len(first), _BLOCK_ROWS):
        a, b = first[start : start + _BLOCK_ROWS], second[start : start + _BLOCK_ROWS]
        cosines = unit[a] @ unit.T
        rows = np.arange(len(a))
        target = cosines[rows, b]
        cosines[rows, a] = -np.inf
        ranks.append((cosines >= target[:, None]).sum(axis=1))
    return np.concatenate(ranks)


def nearest(unit: Embeddings, queries: Embeddings, count: int) -> tuple[npt.NDArray[np.int64], Embeddings]:
    """Rows of ``unit`` nearest to each query and their cosines, [q, count], best first."""
    cosines = queries @ unit.T
    order = np.argsort(-cosines, axis=1, kind="stable")[:, :count]
    return order, np.take_along_axis(cosines, order, axis=1)


def alignment(first: Embeddings, second: Embeddings) -> float:
    """Mean squared distance of positive pairs of unit rows (Wang & Isola, 2020, equation 5); lower is better."""
    return float(np.mean(np.sum((first - second) ** 2, axis=1)))


def uniformity(unit: Embeddings) -> float:
    """log of the mean of exp(−2 ‖x − y‖²) over pairs of distinct rows (Wang & Isola, 2020); lower is better."""
    total, n = 0.0, len(unit)
    for start in range(0, n, _BLOCK_ROWS):
        cosines = unit[start : start + _BLOCK_ROWS] @ unit.T
        total += float(np.exp(4 * (cosines.astype(np.float64) - 1)).sum())
    # The n pairs of a row with itself contribute exp(4 (‖x‖² − 1)) each.
    itself = float(np.exp(4 * ((unit.astype(np.float64) ** 2).sum(axis=1) - 1)).sum())
    return float(np.log((total - itself) / (n * (n - 1))))


def anisotropy(unit: Embeddings) -> float:
    """Mean cosine of pairs of distinct rows, exact (Ethayarajh, 2019); 0 for a space that uses all directions."""
    n = len(unit)
    wide = unit.astype(np.float64)
    return float((np.sum(wide.sum(axis=0) ** 2) - np.sum(wide**2)) / (n * (n - 1)))
