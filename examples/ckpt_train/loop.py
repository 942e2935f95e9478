"""The training loop, as your own script would have it, plus the reports of `ckpt-train`."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from ckpt_component.cli.reports.sweep_figures import earlier_saves
from ckpt_component.factory.graph import build_manager

from .changes import warn_of_changes
from .report import Stopwatch, Summary, time_fence
from .training_job import StepResult, TrainingJob

logger = logging.getLogger(__name__)


def run(job: TrainingJob, checkpoint: Any, checkpoint_dir: str | None) -> Summary:
    """Resume from a checkpoint if there is one, and train to `train.steps` or until a signal.

    Args:
        job: the training job
        checkpoint: the node `checkpoint` of the config
        checkpoint_dir: folder of the checkpoints; None: that of the config

    Returns:
        A summary of the run, after all its saves have ended.

    Raises:
        CheckpointConfigError: the parts of the checkpointer are incompatible; nothing was trained
        CheckpointError: a save or a load failed
    """
    summary = Summary()
    logger.info(job.description)
    with build_manager(checkpoint, dir=checkpoint_dir) as manager:
        manager.stop_on_signal(requeue_exit_code=job.settings.requeue_exit_code)
        saving, fence = Stopwatch(), time_fence(job.optimizer, manager.guard)
        try:
            summary.start = manager.restore(job.state) or 0
        finally:
            if job.leads and manager.restored_from is not None:
                warn_of_changes(manager.restored_from, job.config)
        began = time.perf_counter()
        losses = _Losses(job, summary)
        for step in range(summary.start + 1, job.settings.steps + 1):
            metrics = losses.add(step, job.train_step())
            with saving:
                saves = manager.maybe_save(step, job.state, metrics=metrics)
            if saves:
                losses.begin()
            if manager.should_stop():
                break
        trained_s = time.perf_counter() - began - saving.seconds - fence.seconds
    summary.step, summary.fence_s, summary.reports = job.step, fence.seconds, manager.reports
    summary.earlier = earlier_saves(manager)
    if summary.step > summary.start:
        summary.step_s = trained_s / (summary.step - summary.start)
    elif manager.restored_from is not None:
        summary.take_metrics(manager.path_of(summary.step))
    if manager.stopped_by is not None and summary.step < job.settings.steps:
        summary.stopped_by, summary.leave = manager.stopped_by, manager.exit_if_stopped
        kept = "saved" if manager.enabled else "not saved, because checkpoint.enabled=false"
        logger.info("stopped by %s after step %d, which is %s", manager.stopped_by.name, summary.step, kept)
    return summary


class _Losses:
    """Collects losses on the device, and logs their mean every `train.log_every` steps.

    It is the mean since the last entry or save, so that a run which resumes logs what it would have logged otherwise.
    """

    def __init__(self, job: TrainingJob, summary: Summary) -> None:
        self._job = job
        self._summary = summary
        self.begin()

    def begin(self) -> None:
        """Begin with the next step."""
        self._losses: list[torch.Tensor] = []
        self._since = time.perf_counter()

    def add(self, step: int, result: StepResult) -> dict[str, float]:
        """Add the loss of a step. Returns what is computed at this step: `loss`, `validation_loss`."""
        metrics = {}
        settings = self._job.settings
        self._losses.append(result.loss)
        last = step == settings.steps
        if last or step % settings.log_every == 0:
            metrics["loss"] = loss = self._job.mean_loss(self._losses)
            pace = (time.perf_counter() - self._since) / len(self._losses) * 1e3
            self.begin()
            self._summary.losses.append((step, loss))
            text = "step %*d/%d  loss %.4f  lr %.2e  grad norm %.2f  %.0f ms/step"
            width = len(str(settings.steps))
            logger.info(text, width, step, settings.steps, loss, result.lr, float(result.norm), pace)
        if settings.eval_every is not None and (last or step % settings.eval_every == 0):
            validation = self._job.validation_loss()
            if validation is not None:
                metrics["validation_loss"] = validation
                self._summary.validation.append((step, validation))
                logger.info("step %d  validation loss %.4f", step, validation)
        return metrics
