# SPDX-License-Identifier: Apache-2.0
"""A DeepSpeed JSON file with every "auto" filled from the recipe, and every contradiction refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from fastprompt.config import TrainConfig
from fastprompt.errors import FastpromptError

_DEFAULT: dict[str, Any] = {"zero_optimization": {"stage": 1}}
_ABSENT = object()


def load_deepspeed_config(config: TrainConfig, world_size: int, hidden_size: int) -> dict[str, Any]:
    """The config for ``deepspeed.initialize``.

    Args:
        config: the run; ``config.deepspeed_config`` names the file, ZeRO stage 1 when None.
        world_size: number of ranks.
        hidden_size: of the model, for ZeRO-3's bucket sizes.

    Raises:
        FastpromptError: no such file, not JSON, a value that contradicts the recipe, an ``optimizer`` or
            ``scheduler`` section, an "auto" that nothing fills, a precision that the stage does not support.
    """
    where = config.deepspeed_config or "the default DeepSpeed config"
    values = _read(config.deepspeed_config) if config.deepspeed_config else copy.deepcopy(_DEFAULT)
    for section in ("bf16", "fp16", "zero_optimization"):
        if not isinstance(values.get(section, {}), dict):
            raise FastpromptError(f'{where}: {section} must be an object, as in "zero_optimization": {{"stage": 2}}')
    for section in ("optimizer", "scheduler"):
        if section in values:
            raise FastpromptError(
                f"{where} has a section {section!r}, but the recipe decides it (learning_rate, warmup_steps, "
                "weight_decay, adam_…); remove the section"
            )
    part = config.global_batch_size // (config.gradient_accumulation_steps * world_size)
    # DeepSpeed key → (value, the recipe settings it comes from)
    from_recipe: dict[str, tuple[Any, str]] = {
        "train_batch_size": (config.global_batch_size, "global_batch_size"),
        "train_micro_batch_size_per_gpu": (
            part,
            f"global_batch_size / (gradient_accumulation_steps × {world_size} ranks)",
        ),
        "gradient_accumulation_steps": (config.gradient_accumulation_steps, "gradient_accumulation_steps"),
        "gradient_clipping": (config.gradient_clipping, "gradient_clipping"),
        "bf16.enabled": (config.precision == "bf16", f"precision {config.precision}"),
        "fp16.enabled": (config.precision == "fp16", f"precision {config.precision}"),
    }
    for key, (value, source) in from_recipe.items():
        stated = _get(values, key)
        if stated in (_ABSENT, "auto"):
            _set(values, key, value)
        elif stated != value:
            raise FastpromptError(
                f"{where} says {key} = {stated}, the recipe says {value} ({source}); "
                f'write "auto" in the file, or change the recipe or its flag'
            )
    sizes = {
        "zero_optimization.reduce_bucket_size": hidden_size**2,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * hidden_size**2),
        "zero_optimization.stage3_param_persistence_threshold": 10 * hidden_size,
    }
    for key, size in sizes.items():
        if _get(values, key) == "auto":
            _set(values, key, size)
    left = _find_auto(values)
    if left:
        raise FastpromptError(f'{where}: nothing fills "auto" at {left}; write a value there')
    stage = zero_stage(values)
    if stage not in (0, 1, 2, 3):
        raise FastpromptError(f"{where}: zero_optimization.stage is {stage!r}; it must be 0, 1, 2 or 3")
    if config.precision != "fp32" and stage == 0:
        raise FastpromptError(
            f"precision {config.precision} keeps float32 master weights, which needs ZeRO stage 1 or higher, but "
            f"{where} has stage 0; raise the stage or use precision fp32"
        )
    # Our own progress replaces DeepSpeed's print-outs.
    values.setdefault("steps_per_print", 10**9)
    return values


def zero_stage(values: dict[str, Any]) -> int:
    """The ZeRO stage of a DeepSpeed config; 0 when it has none."""
    stage: int = values.get("zero_optimization", {}).get("stage", 0)
    return stage


def _read(path: str) -> dict[str, Any]:
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FastpromptError(f"no DeepSpeed config {path}; the project's own are in ds_configs/") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FastpromptError(f"DeepSpeed config {path} is not valid JSON ({error}); correct it") from None
    if not isinstance(values, dict):
        raise FastpromptError(f"DeepSpeed config {path} must be a JSON object, as in ds_configs/zero2.json")
    return values


def _get(values: dict[str, Any], key: str) -> Any:
    found: Any = values
    for name in key.split("."):
        if not isinstance(found, dict) or name not in found:
            return _ABSENT
        found = found[name]
    return found


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[name] = value


def _find_auto(values: Any, path: str = "") -> str | None:
    if values == "auto":
        return path
    if isinstance(values, dict):
        for name, value in values.items():
            found = _find_auto(value, f"{path}.{name}".lstrip("."))
            if found:
                return found
    return None
