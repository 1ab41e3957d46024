# SPDX-License-Identifier: Apache-2.0
"""Scores of embeddings: semantic textual similarity, neighbours, geometry."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Embeddings = npt.NDArray[np.floating[Any]]
"""[n, H]."""
Encode = Callable[[Sequence[str]], Embeddings]
"""Sentences to embeddings, one row a sentence."""


def unit_rows(embeddings: Embeddings) -> Embeddings:
    """Rows scaled to length 1; a zero row stays zero."""
    norms = np.linalg.norm(embeddings, axis=1, keepdims=True)
    scaled: Embeddings = embeddings / np.maximum(norms, np.finfo(embeddings.dtype).tiny)
    return scaled
