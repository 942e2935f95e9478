"""From the settings of a config to the policies and deadlines of a run, which know nothing of configs."""

from __future__ import annotations

from typing import Any

from ..config.hydra.hydra_errors import HydraConfigError
from ..config.rules import deadlines, longest_pause
from ..config.schema import Checkpoint
from ..core.commit.cleanup import BestPolicy, RetentionPolicy
from ..core.options import Commit, Durability, MetricMode, ResolvedTimeouts
from ..managing.policies import SavePolicy
from ..saving.retry import ErrorPolicy


def load_options(settings: Checkpoint) -> dict[str, Any]:
    """Return the arguments of `Checkpointer.load` that are set."""
    load = settings.load
    options = {"rename": load.rename, "prefix": load.prefix, "ignore": load.ignore}
    return {name: value for name, value in options.items() if value}


def storage_arguments(settings: Checkpoint) -> dict[str, Any]:
    """Return the arguments of `Storages` and `storage_at`."""
    return {
        "durable": settings.durability is Durability.power_cut,
        "atomic_rename": settings.commit is Commit.rename,
        "options": settings.storage.options,
    }


def resolved_timeouts(settings: Checkpoint) -> ResolvedTimeouts:
    """Return the deadlines, with the time that retries may take."""
    times, policy = deadlines(settings), error_policy(settings)
    again = (policy.attempts - 1) * (times["stage"] + times["write"]) + policy.pauses
    return ResolvedTimeouts(**times, max_stall=settings.max_stall_s, again=again)


def error_policy(settings: Checkpoint) -> ErrorPolicy:
    """Return what to do about saves that fail."""
    on_error, retry = settings.on_error.value, settings.retry
    return ErrorPolicy(
        warn=on_error == "warn",
        attempts=retry.attempts if on_error == "retry" else 1,
        backoff_seconds=retry.backoff_seconds,
        max_backoff_seconds=longest_pause(retry),
        give_up_after=None if on_error == "raise" else settings.give_up_after,
        min_free_bytes=settings.min_free_bytes,
    )


def best_policy(settings: Checkpoint) -> BestPolicy | None:
    """Return how checkpoints are compared; None: they are not.

    Raises:
        CheckpointConfigError: `resume=best` without a metric
    """
    keep = settings.keep.best
    if keep.metric is None:
        if settings.resume == "best":
            raise HydraConfigError(
                "checkpoint.resume=best needs a metric to compare, and checkpoint.keep.best.metric is null; name one "
                "that the checkpoints were saved with, such as checkpoint.keep.best.metric=val_loss."
            )
        return None
    return BestPolicy(keep.metric, keep.mode is MetricMode.max, keep.last)


def save_policy(settings: Checkpoint) -> SavePolicy:
    """Return when to save."""
    save, kept = settings.save, settings.recovery.every_steps
    return SavePolicy(save.every_steps, save.every_seconds, save.at_end, settings.overlap.value, kept)


def retention_policies(settings: Checkpoint) -> list[RetentionPolicy]:
    """Return which checkpoints to keep in each folder of a run, the nearest first."""
    policies = [RetentionPolicy(settings.keep.last, settings.keep.every_steps)]
    return policies if settings.local.dir is None else [RetentionPolicy(settings.local.keep_last), *policies]
