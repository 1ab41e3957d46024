# SPDX-License-Identifier: Apache-2.0
"""The encoder over transformers' own modules and weights, and its heads."""

from fastprompt.model.encoder import PromptEncoder

__all__ = ["PromptEncoder"]
