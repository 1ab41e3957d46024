# SPDX-License-Identifier: Apache-2.0
"""The operations of prompt-based contrastive learning, usable without the rest of fastprompt."""

from fastprompt_kernels.info_nce import InfoNCEOutput, info_nce
from fastprompt_kernels.mask_delta_pool import mask_delta_pool

__all__ = ["InfoNCEOutput", "info_nce", "mask_delta_pool"]
