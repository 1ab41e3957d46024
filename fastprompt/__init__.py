# SPDX-License-Identifier: Apache-2.0
"""fastprompt: fast training of prompt-based contrastive sentence embeddings."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["FastpromptError", "PromptEncoder", "__version__"]


def __getattr__(name: str) -> Any:
    # Importing torch and transformers takes seconds: ``fastprompt --help`` should not.
    if name == "PromptEncoder":
        from fastprompt.model import PromptEncoder

        return PromptEncoder
    if name == "FastpromptError":
        from fastprompt.errors import FastpromptError

        return FastpromptError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
