# SPDX-License-Identifier: Apache-2.0
"""The only file that imports deepspeed: start of the ranks, the engine, and weights gathered out of it."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from fastprompt.config import TrainConfig
from fastprompt.distributed import free_port
from fastprompt.errors import FastpromptError


@contextmanager
def joined_ranks() -> Iterator[torch.device]:
    """Join the process group that the launcher describes, or one of a single process; yields this rank's device."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed calls collectives by names that newer torch versions have renamed.
    warnings.filterwarnings("ignore", message=".*is deprecated. Please use.*", category=FutureWarning)
    described = {} if "RANK" in os.environ else _one_process()
    os.environ.update(described)
    try:
        device = _choose_device()
        deepspeed.init_distributed(verbose=False)
        yield device
    finally:
        # Without this some backends complain at exit.
        if dist.is_initialized():
            dist.destroy_process_group()
        for name in described:  # a child process is not part of this group
            os.environ.pop(name, None)


def _one_process() -> dict[str, str]:
    """What a launcher would set for a single rank."""
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return {name: str(value) for name, value in alone.items()}


def _choose_device() -> torch.device:
    accelerator = get_accelerator()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if accelerator.device_name() != "cpu":
        accelerator.set_device(local_rank)
        return torch.device(accelerator.device_name(), local_rank)
    # Ranks that each start a thread for every core would fight for them.
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    if "OMP_NUM_THREADS" not in os.environ and ranks_here > 1:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks_here))
    return torch.device("cpu")


def build_engine(module: nn.Module, config: TrainConfig, deepspeed_config: dict[str, Any], total_steps: int) -> Any:
    """``deepspeed.initialize`` with the recipe's AdamW and its linear warm-up and decay."""
    if config.precision == "fp16" and get_accelerator().device_name() == "cpu":
        raise FastpromptError("precision fp16 does not train on a CPU; use bf16 or fp32")
    decayed = [p for p in module.parameters() if p.ndim > 1]
    plain = [p for p in module.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups if config.weight_decay else module.parameters(),
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )

    def scale(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        return max(0.0, (total_steps - step) / max(1, total_steps - config.warmup_steps))

    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, scale),
        config=deepspeed_config,
    )
    return engine


def full_state(engine: Any) -> dict[str, Tensor]:
    """The module's state dict, float32 master weights, on the CPU; a collective operation. Empty but on rank 0."""
    state = {}
    for name, parameter in engine.module.named_parameters():
        full = safe_get_full_fp32_param(parameter)  # None for the plain float32 parameters of stage 0
        if dist.get_rank() == 0:
            state[name] = (parameter.detach() if full is None else full).to("cpu", torch.float32, copy=True)
    return state
