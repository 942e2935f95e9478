"""Checkpoints of a Lightning `Trainer`: `Trainer(callbacks=[CheckpointCallback(dir="checkpoints")])`.

The callback saves all that `Trainer.fit` needs to continue as if it had never stopped, through a `CheckpointManager`,
and resumes by itself. `BackgroundCheckpointIO` writes Lightning's own `.ckpt` files instead.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from ..config.hydra.compose import checked_overrides
from ..config.hydra.resolve import resolve_config
from ..core.spelling import closest
from ..errors import CheckpointConfigError, CheckpointError, CheckpointTypeError
from ..factory.graph import build_manager
from ..managing.manager import CheckpointManager
from ..managing.stop_signals import REQUEUE_EXIT_CODE, STOPPING, checked_signals
from ..state.paths import PerRank
from .lightning_io import BackgroundCheckpointIO
from .lightning_package import fabric, part
from .lightning_position import Position

__all__ = ["BackgroundCheckpointIO", "CheckpointCallback"]

logger = logging.getLogger(__name__)

_environments = fabric("plugins.environments")
_REQUEUE_SECONDS = 60.0


def catch_signals(trainer: Any, manager: CheckpointManager, requeue_exit_code: int) -> None:
    """Have the manager catch the signals that Lightning has handlers for. After `register_signal_handlers`."""
    trainer._signal_connector.teardown()
    environment = trainer._accelerator_connector.cluster_environment
    requeue_signal = getattr(environment, "requeue_signal", None)  # that of Slurm, which may be another than SIGUSR1
    numbers = {*STOPPING, *([requeue_signal] if requeue_signal is not None else [])}
    manager.stop_on_signal(*sorted(numbers), requeue_exit_code=requeue_exit_code)


def leave(trainer: Any, manager: CheckpointManager, requeue_exit_code: int) -> NoReturn:
    """Save the step that the loop has reached, and end the process, as `exit_if_stopped` says.

    A job for which Lightning's `auto_requeue` is on is queued again first, as Lightning does.

    Raises:
        SystemExit: always, unless the step could not be saved
        CheckpointError: that
    """
    manager.__exit__(None, None, None)
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, _environments.SLURMEnvironment) and environment.auto_requeue:
        number = environment.requeue_signal
        if number is not None and signal.getsignal(number) in (None, signal.SIG_DFL):  # submitit has one that requeues
            signal.signal(number, partial(_requeue, trainer.is_global_zero, requeue_exit_code))
    try:
        manager.exit_if_stopped()
    except SystemExit:
        # Of the processes that Lightning has started itself, a code other than 0 has it kill the others.
        if isinstance(environment, _environments.LightningEnvironment) and environment.local_rank() != 0:
            sys.exit(0)
        raise
    raise CheckpointError("The training was left, but no signal has stopped it.")


def _requeue(queues: bool, exit_code: int, number: int, frame: FrameType | None) -> None:
    """Have Slurm queue this job again; if it does not, leave with the exit code that asks for it."""
    if not queues:  # one rank does it for all
        return
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = os.environ.get("SLURM_JOB_ID", "") if array is None else f"{array}_{task}"
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=_REQUEUE_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        logger.error("job %s is not queued again: %s", job, error)
        sys.exit(exit_code)
    logger.info("job %s is queued again", job)


_Strategy = part("strategies").Strategy
_rank_zero_info = part("utilities.rank_zero").rank_zero_info
#: What Lightning says when it continues in the middle of an epoch; untrue if the position in the data is restored.
_NOT_RESUMABLE = "You're resuming from a checkpoint that ended before"
#: Arguments of Lightning's ModelCheckpoint, and what to use here.
_INSTEAD = {
    "dirpath": "use dir=...",
    "every_n_train_steps": "add checkpoint.save.every_steps=100 to overrides",
    "train_time_interval": "add checkpoint.save.every_seconds=600 to overrides",
    "save_top_k": "name the metric by monitor, and add checkpoint.keep.best.last=3 to overrides",
    "save_last": "the newest checkpoint is always kept; leave it out",
    "filename": "folders are named iter_<step>; leave it out",
    "save_weights_only": "all that fit needs is saved; leave it out",
    "save_on_exception": "a signal saves the step that it interrupts; leave it out",
    **dict.fromkeys(["every_n_epochs", "save_on_train_epoch_end"], "add checkpoint.save.every_steps=100 to overrides"),
}


class _TrainerState:
    """What Lightning puts into a checkpoint, without the hyperparameters, which `fit` does not read."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.training = False
        self.loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """What Lightning would save now; nothing before the training."""
        if not self.training:
            return {}
        state: dict[str, Any] = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        state["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)  # `Position` has it for every rank
        return {key: value for key, value in state.items() if "hparams" not in key and "hyper_parameters" not in key}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a loaded state, for `restore`."""
        self.loaded = state

    def restore(self) -> None:
        """Let Lightning restore module, data module and callbacks now, and the rest at its time."""
        connector = self._trainer._checkpoint_connector
        connector._loaded_checkpoint, self.loaded = self.loaded, {}
        connector.restore_model()
        connector.restore_datamodule()
        connector.restore_callbacks()


class _Metrics(Mapping[str, Any]):
    """What the module has logged for callbacks; computed when a save asks for it."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __getitem__(self, name: str) -> Any:
        return self._trainer.callback_metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._trainer.callback_metrics)

    def __len__(self) -> int:
        return len(self._trainer.callback_metrics)


class CheckpointCallback(part("callbacks").Checkpoint):  # type: ignore[misc]
    """Saves and resumes `Trainer.fit`, as the config says.

    It takes the place of Lightning's default `ModelCheckpoint`. Steps are the Trainer's `global_step`. The state of
    step n is saved before the batch that follows, after the validation of that step, if there is one.

    Args:
        checkpoint: a preset's name or the `checkpoint` node of a config
        overrides: as for `build_manager`: `checkpoint.save.every_steps=50`
        dir: folder of the checkpoints; None: `checkpoint.dir`
        monitor: a metric that the module logs, such as `val_loss`; the checkpoint with the best value is kept too. It
            sets `checkpoint.keep.best.metric`.
        mode: `min` or `max`: which value of it is the best
        stop_on_signal: at SIGTERM, SIGINT, SIGUSR1, SIGUSR2 and the `requeue_signal` of Lightning's Slurm environment,
            save the step of that moment, and leave `fit` by a `SystemExit` with the exit code of
            `CheckpointManager.exit_if_stopped`. False: Lightning's own handlers stay, and nothing is saved here.
        requeue_exit_code: the exit code after a warning such as SIGUSR1
        **unknown: refused, with what to use instead of an argument of `ModelCheckpoint`

    Attributes:
        manager: the manager of the running `fit`, or None

    Raises:
        CheckpointConfigError: the config is wrong
        CheckpointTypeError: there is no such argument
    """

    #: For code that asks `trainer.checkpoint_callback` for Lightning's file, if there is no `ModelCheckpoint`.
    best_model_path = ""

    def __init__(
        self,
        checkpoint: Any = "async_persistent",
        overrides: Sequence[str] = (),
        dir: str | os.PathLike[str] | None = None,
        monitor: str | None = None,
        mode: str = "min",
        stop_on_signal: bool = True,
        requeue_exit_code: int = REQUEUE_EXIT_CODE,
        **unknown: Any,
    ) -> None:
        for name in unknown:
            raise CheckpointTypeError(_no_argument(name))
        checked_signals((), requeue_exit_code)
        overrides = [*checked_overrides(overrides)]
        if monitor is not None:
            overrides += [f"checkpoint.keep.best.metric={monitor!r}", f"checkpoint.keep.best.mode={mode}"]
        self._saves_at_end = resolve_config(checkpoint, overrides).save.at_end  # a wrong config is refused here
        self._config, self._overrides, self._dir = checkpoint, overrides, dir
        self._stops, self._requeue_exit_code = stop_on_signal, requeue_exit_code
        self.manager: CheckpointManager | None = None
        self._state: dict[str, Any] = {}
        self._step: int | None = None
        #: Hides a warning of Lightning from the resume to the first batch.
        self._silence: warnings.catch_warnings[Any] | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave the place of `trainer.checkpoint_callback`, which is the first in the list, to a `ModelCheckpoint`."""
        trainer.callbacks = [*(each for each in trainer.callbacks if each is not self), self]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Build the manager, and resume."""
        strategy = type(trainer.strategy)
        if strategy.load_checkpoint is not _Strategy.load_checkpoint:
            raise CheckpointConfigError(
                f"CheckpointCallback restores a whole model on every rank, and {strategy.__name__} shards it; use "
                "Trainer(strategy='auto' or 'ddp'), or leave the callback out."
            )
        self.manager = manager = build_manager(self._config, self._overrides, dir=self._dir)
        self._metrics = _Metrics(trainer)
        self._trainer_state, self._position = _TrainerState(trainer), Position(trainer)
        self._state = {"trainer": self._trainer_state, "position": PerRank(self._position, when_resized="keep")}
        self._step = manager.restore(self._state)
        if self._step is not None:
            self._trainer_state.restore()
            self._position.restore_loaders()
        self._position.begin_fit()

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Catch signals from now on."""
        if self.manager is not None and self.manager.enabled and self._stops:
            catch_signals(trainer, self.manager, self._requeue_exit_code)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Continue in the middle of the epoch."""
        if self.manager is None:
            return
        self.on_sanity_check_start(trainer, pl_module)  # if there was none
        self._trainer_state.training = True
        self.manager.guard(trainer.optimizers)
        if self._step is None:
            self._step = trainer.global_step
            return
        exactly = self._position.replay()
        path = trainer.ckpt_path
        _rank_zero_info(
            f"Continuing after step {self._step} from {self.manager.restored_from}"
            + (f", not from {path}" if path else "")
            + (", with its random states and its position in the data" if exactly else "")
        )
        if exactly:
            self._silence = warnings.catch_warnings()
            self._silence.__enter__()
            warnings.filterwarnings("ignore", _NOT_RESUMABLE)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Note the random state that the order of the epoch's batches follows from."""
        self._position.begin_epoch()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        """Save the step before this batch, and leave if a signal asks for it."""
        self._end_silence()
        self._position.begin_batch()
        manager = self.manager
        if manager is None or trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        manager.maybe_save(self._step, self._state, metrics=self._metrics)
        if self._stops and manager.enabled and manager.should_stop():
            self.manager = None
            leave(trainer, manager, self._requeue_exit_code)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        """Save the last step in the middle of an epoch, because Lightning then ends the epoch."""
        self._position.end_batch()
        ends = 0 <= trainer.max_steps <= trainer.global_step
        if ends and not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._save_last(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Note the random state after the validation."""
        if not trainer.sanity_checking and self.manager is not None:
            self._position.end_batch()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the last step, and wait until it is committed."""
        self._save_last(trainer)
        self.teardown(trainer, pl_module, "fit")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the manager, and let the exception of the training be raised."""
        self._end_silence()
        manager, self.manager = self.manager, None
        if manager is not None:
            manager.__exit__(type(exception), exception, exception.__traceback__)  # logs what it would raise

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close the manager."""
        self._end_silence()
        manager, self.manager = self.manager, None
        if manager is not None:
            manager.close()

    def _save_last(self, trainer: Any) -> None:
        if self.manager is None:
            return
        self._step = trainer.global_step
        save = self.manager.save if self._saves_at_end else self.manager.maybe_save
        save(self._step, self._state, metrics=self._metrics)

    def _end_silence(self) -> None:
        silence, self._silence = self._silence, None
        if silence is not None:
            silence.__exit__(None, None, None)


def _no_argument(name: str) -> str:
    names = ["checkpoint", "overrides", "dir", "monitor", "mode", "stop_on_signal", "requeue_exit_code"]
    near = closest(name, names)
    instead = _INSTEAD.get(name, f"did you mean {near}?" if near else f"there are {', '.join(names)}")
    return f"CheckpointCallback has no argument {name}: {instead}."
