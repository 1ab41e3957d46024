# SPDX-License-Identifier: Apache-2.0
"""The operations of prompt-based contrastive learning, usable without the rest of fastprompt."""

from fastprompt_kernels.dispatch import BACKENDS, get_backend, set_backend
from fastprompt_kernels.dropout_add import dropout_add
from fastprompt_kernels.info_nce import InfoNCEOutput, info_nce
from fastprompt_kernels.mask_delta_pool import mask_delta_pool
from fastprompt_kernels.packed_attention import packed_attention
from fastprompt_kernels.prompt_info_nce import prompt_info_nce

__all__ = [
    "BACKENDS",
    "InfoNCEOutput",
    "dropout_add",
    "get_backend",
    "info_nce",
    "mask_delta_pool",
    "packed_attention",
    "prompt_info_nce",
    "set_backend",
]
