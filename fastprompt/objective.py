# SPDX-License-Identifier: Apache-2.0
"""pool → head → InfoNCE against the global batch.

    loss = mean_i [ logsumexp_j( cos(z_i¹, z_j²)/τ ∪ cos(z_i¹, z_j³)/τ + w·1[i=j] ) − cos(z_i¹, z_i²)/τ ]

with i over this rank's sentences and j over the sentences of all ranks (PromptBERT, equation 4; SimCSE, equation 5).
"""

from __future__ import annotations

from typing import Any

import torch
from fastprompt_kernels import info_nce, prompt_info_nce
from torch import Tensor, nn

from fastprompt.data.batching import ContrastiveBatch
from fastprompt.distributed import gather_rows, rank
from fastprompt.model.encoder import PromptEncoder
from fastprompt.profiling import stage


class PromptObjective(nn.Module):
    """The training objective around an encoder: the module that DeepSpeed wraps.

    Args:
        encoder: encodes the prompts.
        temperature: τ of InfoNCE.
        hard_negative_weight: added to the logit of a sentence's own hard negative.
        autocast: compute in bf16 with float32 weights (``torch.autocast``).
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        *,
        temperature: float,
        hard_negative_weight: float = 0.0,
        autocast: bool = False,
    ) -> None:
        super().__init__()
        self.autocast = autocast
        self.encoder = encoder
        self.temperature = temperature
        self.hard_negative_weight = hard_negative_weight

    def forward(self, batch: ContrastiveBatch) -> Tensor:
        """This rank's share of the loss, scalar.

        It is scaled so that its *average* over ranks is the global batch's mean loss, and the average of the ranks'
        gradients (which is what ZeRO forms) the gradient of that mean, also when ranks hold unequal numbers of rows.
        """
        # Here and not around the engine, which switches it off inside.
        with torch.autocast(batch.prompts.input_ids.device.type, torch.bfloat16, enabled=self.autocast):
            return self._loss(batch)

    def _loss(self, batch: ContrastiveBatch) -> Tensor:
        counts = batch.rows_per_rank
        settings: dict[str, Any] = {
            "temperature": self.temperature,
            "hard_negative_weight": self.hard_negative_weight,
            "reduction": "sum",
        }
        if self.encoder.head is None and len(counts) == 1:
            # Nothing between the hidden states and the loss, and no rows of other ranks: one call for the whole tail.
            hidden, rows, deltas = self.encoder.pool_inputs(batch.prompts)
            shape, which = (batch.num_views, -1), batch.prompts.delta_index
            which = None if which is None else which.view(shape)
            with stage("tail"):
                return prompt_info_nce(hidden, rows.view(shape), which, deltas, **settings).loss / counts[0]
        embeddings = self.encoder(batch.prompts, with_head=True)
        views = embeddings.view(batch.num_views, -1, embeddings.shape[-1])
        with stage("tail"):
            output = info_nce(
                views[0],
                gather_rows(views[1], counts),
                positive_offset=sum(counts[: rank()]),
                hard_negative=gather_rows(views[2], counts) if batch.num_views == 3 else None,
                **settings,
            )
            return output.loss * (len(counts) / sum(counts))
