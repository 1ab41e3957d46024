# SPDX-License-Identifier: Apache-2.0
"""Gather of the [MASK] rows, minus the template's bias.

    out[i] = hidden_states[mask_index[i]] − delta_rows[delta_index[i]]

Source: PromptBERT (Jiang et al., 2022), section 4.3, template denoising: ĥ_i = h_i − ĥ_template(n_i).
"""

from torch import Tensor


def mask_delta_pool(
    hidden_states: Tensor,
    mask_index: Tensor,
    delta_index: Tensor | None = None,
    delta_rows: Tensor | None = None,
) -> Tensor:
    """Pick one row of ``hidden_states`` a sentence and subtract the delta of its (template, length).

    Args:
        hidden_states: [T, H], float; the last hidden states of all tokens.
        mask_index: [N], int64; the row of each sentence's [MASK].
        delta_index: [N], int64, or None for no subtraction; which delta belongs to each sentence.
        delta_rows: [K, H], float, or None exactly when ``delta_index`` is.

    Returns:
        [N, H] in the dtype of ``hidden_states``. Gradients flow to ``hidden_states`` (zero in rows that no
        sentence picks) and to ``delta_rows`` (minus the sum over the sentences that share the delta).

    Raises:
        ValueError: shapes that do not fit, or only one of ``delta_index`` and ``delta_rows`` given.
        IndexError: an index out of range (on CPU; CUDA asserts on the device).
    """
    if hidden_states.ndim != 2 or mask_index.ndim != 1:
        raise ValueError(
            "mask_delta_pool wants hidden_states [T, H] and mask_index [N], "
            f"got {tuple(hidden_states.shape)} and {tuple(mask_index.shape)}"
        )
    rows = hidden_states.index_select(0, mask_index)
    if delta_index is None and delta_rows is None:
        return rows
    if delta_index is None or delta_rows is None:
        raise ValueError("mask_delta_pool wants delta_index and delta_rows together, or neither")
    if delta_index.shape != mask_index.shape:
        raise ValueError(
            f"mask_delta_pool wants one delta_index a sentence: {tuple(delta_index.shape)} for "
            f"{mask_index.shape[0]} sentences"
        )
    if delta_rows.ndim != 2 or delta_rows.shape[1] != hidden_states.shape[1]:
        raise ValueError(
            f"mask_delta_pool wants delta_rows [K, {hidden_states.shape[1]}], got {tuple(delta_rows.shape)}"
        )
    return rows - delta_rows.index_select(0, delta_index)
