# SPDX-License-Identifier: Apache-2.0
"""The training loop on DeepSpeed: one run, from settings to checkpoints."""

from __future__ import annotations

import logging
import math
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastprompt import checkpoint
from fastprompt.checkpoint import TrainerState
from fastprompt.config import METRICS, TrainConfig, dump_yaml
from fastprompt.data.batching import BatchPlan, ContrastiveBatch, collate
from fastprompt.data.cache import open_token_cache
from fastprompt.data.prefetch import Prefetcher
from fastprompt.data.reading import RowReader
from fastprompt.deepspeed_config import load_deepspeed_config, zero_stage
from fastprompt.distributed import all_reduce_sum, barrier, encode_over_ranks, rank, world_size
from fastprompt.engine import build_engine
from fastprompt.environment import compare_environments, describe_environment
from fastprompt.errors import FastpromptError
from fastprompt.evaluation.neighbours import evaluate_neighbours, load_pairs
from fastprompt.evaluation.sts import load_task, sts_score
from fastprompt.files import write_text, writing_to
from fastprompt.model import PromptEncoder
from fastprompt.objective import PromptObjective
from fastprompt.profiling import SKIPPED_STEPS, StepProfiler, stage
from fastprompt.progress import TrainingProgress
from fastprompt.prompts import PromptTokenizer

log = logging.getLogger(__name__)


class Trainer:
    """One run. Whatever can fail for lack of a file, a setting or a folder fails in the constructor.

    Args:
        config: the run's settings.
        device: this rank's device.
        resume: continue the run in ``config.output_dir`` from its last checkpoint.

    Raises:
        FastpromptError: bad settings, data, model or folder; a resume that would not continue the same run.
    """

    def __init__(self, config: TrainConfig, device: torch.device, *, resume: bool = False) -> None:
        self.config = config
        self.device = device
        self.folder = Path(config.output_dir)
        resumed = self._claim_folder(resume)
        if config.train_file is None:
            raise FastpromptError("no training file; pass --train_file FILE")
        RowReader(config.train_file)  # an unusable file is an error before any model loads
        self._metric, self._evaluators = self._load_evaluations()
        _seed_everything(config.seed, config.deterministic)
        encoder = PromptEncoder.from_pretrained(resumed or config.model, config.encoder, dropout=config.dropout)
        if config.max_sentence_tokens > encoder.tokenizer.max_sentence_tokens:
            raise FastpromptError(
                f"max_sentence_tokens {config.max_sentence_tokens} and the template exceed the model's "
                f"{encoder.tokenizer.max_positions} positions; at most {encoder.tokenizer.max_sentence_tokens} fit"
            )
        self._check_budget(encoder.tokenizer)
        encoder.packed.configure(gradient_checkpointing=config.gradient_checkpointing, compile=config.compile)
        cache_dir = Path(config.cache_dir) if config.cache_dir else None
        self.cache = open_token_cache(config.train_file, encoder.tokenizer, config.max_sentence_tokens, cache_dir)
        self.plan = BatchPlan(
            self.cache.rows,
            config.global_batch_size,
            config.gradient_accumulation_steps,
            world_size(),
            config.seed,
        )
        steps = self.plan.total_steps(config.num_train_epochs, config.max_steps)
        self.state = TrainerState(max_steps=steps, metric=self._metric)
        deepspeed_config = load_deepspeed_config(config, world_size(), encoder.backbone.config.hidden_size)
        self.environment = describe_environment(
            config,
            data_hash=self.cache.data_hash,
            world_size=world_size(),
            zero_stage=zero_stage(deepspeed_config),
        )
        if resumed:
            for difference in compare_environments(checkpoint.load_environment(resumed), self.environment):
                log.warning("resuming although %s", difference)
            self.state = self._restored_state(resumed)
        # Every rank starts from rank 0's weights (DeepSpeed broadcasts them) but draws its own dropout.
        torch.manual_seed(config.seed + 1 + rank())
        if 0 < steps - self.state.global_step < config.profile + SKIPPED_STEPS:
            raise FastpromptError(
                f"profiling {config.profile} steps takes {config.profile + SKIPPED_STEPS} and the run has "
                f"{steps - self.state.global_step} left; lower --profile or raise --max_steps"
            )
        objective = PromptObjective(
            encoder,
            temperature=config.temperature,
            hard_negative_weight=config.hard_negative_weight,
            autocast=config.precision == "bf16_autocast",
        )
        self.encoder = encoder
        self.engine = build_engine(objective, config, deepspeed_config, steps)
        if resumed:
            checkpoint.restore(self.engine, resumed)
        if rank() == 0:
            checkpoint.clear_leftovers(self.folder)
            write_text(self.folder / checkpoint.CONFIG_FILE, dump_yaml(config))
        self._announce(resumed)

    def train(self) -> TrainerState:
        """Run to the end, or to the end of the step in which SIGTERM or SIGINT arrives; returns the state."""
        config, state = self.config, self.state
        if state.finished:
            log.info("%s is complete: nothing left to train", self.folder)
            return state
        started, before = time.monotonic(), state.train_runtime
        stepping = 0.0
        with _stop_requests() as stop, self._prefetching() as batches:
            if state.global_step == 0:
                self._evaluate()
            profiler = StepProfiler(self.folder, config.profile if rank() == 0 else 0, self.device.type)
            with TrainingProgress(state, config.global_batch_size, enabled=rank() == 0) as bar, profiler:
                stopping = False
                while not (state.finished or stopping):
                    learning_rate = self.engine.get_lr()[0]
                    step_started = time.perf_counter()
                    loss, stopping = self._step(batches, stop)
                    stepping += time.perf_counter() - step_started
                    profiler.step()
                    state.train_runtime = before + time.monotonic() - started
                    bar.update(loss, learning_rate)
                    if state.global_step % config.logging_steps == 0 or state.finished:
                        self._log_losses(learning_rate, bar)
                    if config.eval_steps and (state.global_step % config.eval_steps == 0 or state.finished):
                        self._evaluate()
                    due = config.save_steps and state.global_step % config.save_steps == 0
                    if due and not (state.finished or stopping):
                        self._save()
            self._log_wait(batches.seconds_waited, stepping)
            if state.finished:
                self._log_summary()
            self._save()
        if not state.finished:
            log.info(
                "stopped after step %d of %d as asked; everything is saved, continue with --resume --output_dir %s",
                state.global_step, state.max_steps, self.folder,
            )  # fmt: skip
        return state

    def _step(self, batches: Prefetcher[list[ContrastiveBatch]], stop: StopRequest) -> tuple[float, bool]:
        """One optimizer step; the global batch's mean loss, and whether any rank was asked to stop."""
        self.engine.train()
        with stage("data"):
            parts = batches.next()
        share = torch.zeros((), device=self.device)
        for part in parts:
            with stage("data"):
                batch = part.to(self.device)
            loss = self.engine(batch)
            with stage("backward"):
                self.engine.backward(loss)
            with stage("optimizer"):
                self.engine.step()
            share += loss.detach() / len(parts)
        summed = all_reduce_sum(torch.stack([share, share.new_tensor(float(stop.requested))]))
        loss_sum, stops = summed.tolist()
        mean = loss_sum / world_size()
        state = self.state
        state.global_step += 1
        state.epoch = state.global_step / self.plan.steps_per_epoch
        state.samples_seen += sum(sum(part.rows_per_rank) for part in parts)
        if not math.isfinite(mean):
            raise FastpromptError(
                f"the loss is {mean} at step {state.global_step}; nothing was saved from this step on, the last "
                f"good checkpoint in {self.folder} stands; lower learning_rate, or use precision bf16 or fp32"
            )
        state.loss_window.append(mean)
        state.loss_sum += mean
        return mean, stops > 0

    @contextmanager
    def _prefetching(self) -> Iterator[Prefetcher[list[ContrastiveBatch]]]:
        """This rank's batches of the steps that are left."""
        batches = Prefetcher(self._collate, range(self.state.global_step, self.state.max_steps))
        try:
            yield batches
        finally:
            batches.close()

    def _collate(self, step: int) -> list[ContrastiveBatch]:
        config = self.config
        made = [
            collate(
                self.cache,
                part,
                rank(),
                self.encoder.tokenizer.prompts,
                delta=config.delta,
                freeze_delta=config.freeze_delta,
                tokens_per_micro_batch=config.tokens_per_micro_batch,
            )
            for part in self.plan.rows(step)
        ]
        return [batch.pin_memory() for batch in made] if self.device.type == "cuda" else made

    def _check_budget(self, tokenizer: PromptTokenizer) -> None:
        budget = self.config.tokens_per_micro_batch
        longest = self.config.max_sentence_tokens + max(len(prompt) for prompt in tokenizer.prompts)
        if budget is not None and budget < 2 * longest:
            raise FastpromptError(
                f"tokens_per_micro_batch is {budget}; the longest prompt has {longest} tokens, and at least two of "
                f"them ({2 * longest}) must fit"
            )

    def _evaluate(self) -> None:
        if not self._evaluators:
            return
        metrics: dict[str, float] = {}
        for evaluate in self._evaluators:
            metrics |= evaluate()
        self._append_log(metrics)
        log.info("step %d: %s", self.state.global_step, ", ".join(f"{k} {v:.4f}" for k, v in metrics.items()))
        state, value = self.state, metrics[self._metric or ""]
        # The untrained model is scored to see that evaluation works, but it is nobody's best checkpoint.
        if state.global_step and math.isfinite(value) and (state.best_metric is None or value > state.best_metric):
            state.best_metric = value
            state.best_global_step = state.global_step
            state.best_model_checkpoint = str(self.folder / checkpoint.BEST)
            checkpoint.save_best(self.engine, self.folder, state, self.config, self.environment)

    def _save(self) -> None:
        checkpoint.save_last(self.engine, self.folder, self.state, self.config, self.environment)
        if rank() == 0:
            write_text(self.folder / checkpoint.STATE_FILE, self.state.to_json())

    def _log_losses(self, learning_rate: float, bar: TrainingProgress) -> None:
        state = self.state
        entry = {"loss": sum(state.loss_window) / len(state.loss_window), "learning_rate": learning_rate}
        norm = self.engine.get_global_grad_norm()
        if norm is not None:
            entry["grad_norm"] = float(norm)
        state.loss_window = []
        self._append_log(entry)
        bar.log_line(entry)

    def _log_wait(self, waited: float, stepping: float) -> None:
        graphs = self.encoder.packed.graphs_compiled
        log.info(
            "waiting for data: %.2f%% of %.1f s of training steps%s",
            100 * waited / max(stepping, 1e-9), stepping, f"; torch.compile made {graphs} graphs" if graphs else "",
        )  # fmt: skip

    def _log_summary(self) -> None:
        state = self.state
        self._append_log(
            {
                "train_loss": state.loss_sum / state.global_step,
                "train_runtime": state.train_runtime,
                "train_samples_per_second": state.samples_seen / state.train_runtime,
                "train_steps_per_second": state.global_step / state.train_runtime,
            }
        )

    def _append_log(self, entry: dict[str, float]) -> None:
        self.state.log_history.append({**entry, "epoch": round(self.state.epoch, 4), "step": self.state.global_step})

    def _claim_folder(self, resume: bool) -> Path | None:
        """The checkpoint to resume from, or None for a new run in a new or empty folder."""
        if resume:
            return checkpoint.find_last(self.folder)
        checkpoint.check_free(self.folder)
        with writing_to(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        barrier()  # no rank may take what another one writes for an older run's
        return None

    def _restored_state(self, resumed: Path) -> TrainerState:
        state = TrainerState.load(resumed / checkpoint.STATE_FILE)
        if state.metric != self._metric:
            raise FastpromptError(
                f"cannot resume: {state.metric or 'no metric'} chose the best checkpoint so far and "
                f"{self._metric or 'no metric'} would now; evaluate as before (--sts_dir, --eval_file, --eval_steps)"
            )
        return state

    def _load_evaluations(self) -> tuple[str | None, list[Any]]:
        """The metric that chooses the best checkpoint, and functions that each return metrics by name."""
        config = self.config
        if not config.eval_steps:
            return None, []
        chosen = config.metric_for_best_model
        if chosen and getattr(config, METRICS[chosen]) is None:
            raise FastpromptError(
                f"{chosen} chooses the best checkpoint but --{METRICS[chosen]} is not given; "
                "give it, or switch evaluation off with --eval_steps 0"
            )
        evaluators: list[Any] = []
        if config.sts_dir is not None:
            dev = load_task(config.sts_dir, "STSBenchmark", "dev")
            evaluators.append(lambda: {"eval_stsb_spearman": sts_score(self._encode, dev)})
        if config.eval_file is not None:
            pairs = load_pairs(config.eval_file)
            evaluators.append(lambda: {f"eval_{k}": v for k, v in evaluate_neighbours(self._encode, pairs).items()})
        default = next((name for name, setting in METRICS.items() if getattr(config, setting) is not None), None)
        return chosen or default, evaluators

    def _encode(self, sentences: Any) -> Any:
        return encode_over_ranks(
            lambda some: self.encoder.encode(some, batch_size=self.config.eval_batch_size), sentences
        )

    def _announce(self, resumed: Path | None) -> None:
        config = self.config
        part = config.global_batch_size // config.gradient_accumulation_steps
        negatives = (2 * part if self.cache.columns == 3 else part) - 1
        log.info("data: %s", self.cache.summary)
        log.info("encoding: %s", self.encoder.config.describe())
        log.info(
            "training: %d ranks on %s, ZeRO stage %d, %s, global batch %d, %d negatives an anchor, %d steps%s",
            world_size(), self.device.type, self.environment["zero_stage"], config.precision,
            config.global_batch_size, negatives, self.state.max_steps,
            f", resumed at step {self.state.global_step}" if resumed else "",
        )  # fmt: skip


class StopRequest:
    """Set by a signal, read once a step."""

    requested = False


@contextmanager
def _stop_requests() -> Iterator[StopRequest]:
    """Turn SIGTERM and SIGINT into a request to stop after the current step."""
    request = StopRequest()

    def handle(number: int, frame: Any) -> None:
        request.requested = True

    previous = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _seed_everything(seed: int, deterministic: bool) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        # cuBLAS reads this when it starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Otherwise every torch.empty is filled, DeepSpeed's buckets of gigabytes among them, at every step.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
