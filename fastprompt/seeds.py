# SPDX-License-Identifier: Apache-2.0
"""One recipe under several seeds: a single run's score says little when seeds differ by a point."""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fastprompt import checkpoint
from fastprompt.config import TrainConfig
from fastprompt.distributed import barrier, rank
from fastprompt.files import write_text
from fastprompt.trainer import Trainer

log = logging.getLogger(__name__)

REPORT_FILE = "seeds.json"


def train_seeds(
    config: TrainConfig, seeds: Sequence[int], device: torch.device, *, resume: bool
) -> dict[str, Any] | None:
    """Train once a seed, in ``output_dir/seed-N``, and write ``output_dir/seeds.json``.

    With ``resume``, runs that were begun continue and finished ones are taken as they are. A stop request ends the
    series after the current run's step; then there is no report.

    Returns:
        {"runs": [{"seed", "train_loss", "best_metric", …}], "mean": {…}, "std": {…}}: ``std`` is the sample
        standard deviation (n − 1) over seeds.
    """
    folder = Path(config.output_dir)
    places = {seed: folder / f"seed-{seed}" for seed in seeds}
    begun = {seed: resume and (place / checkpoint.LAST).exists() for seed, place in places.items()}
    for seed, place in places.items():  # not when the third run begins
        if not begun[seed]:
            checkpoint.check_free(place)
    barrier()  # before any rank writes there
    runs = []
    for seed, place in places.items():
        log.info("seed %d in %s", seed, place)
        trainer = Trainer(replace(config, seed=seed, output_dir=str(place)), device, resume=begun[seed])
        state = trainer.train()
        trainer.engine.destroy()
        del trainer  # two models need not fit side by side
        if not state.finished:
            return None
        run = {"seed": seed, "train_loss": state.loss_sum / state.global_step}
        if state.best_metric is not None:
            run["best_metric"] = state.best_metric
        runs.append(run)
    report: dict[str, Any] = {"metric": state.metric, "runs": runs, "mean": {}, "std": {}}
    for name in runs[0]:
        if name != "seed":
            values = [run[name] for run in runs]
            report["mean"][name] = statistics.mean(values)
            report["std"][name] = statistics.stdev(values) if len(values) > 1 else 0.0
    if rank() == 0:
        write_text(folder / REPORT_FILE, json.dumps(report, indent=2) + "\n")
    for name, mean in report["mean"].items():
        log.info("%s over %d seeds: %.4f ± %.4f", name, len(runs), mean, report["std"][name])
    return report
