"""Accelerate: `accelerator.save_state` in the background, and a verified `load_state`.

    accelerator = Accelerator()
    save_in_background(accelerator)

The folders are those that Accelerate would write itself, with `manifest.json` and checksums beside its files.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

try:
    from accelerate import Accelerator, DistributedType
except ImportError as error:
    raise ImportError(
        f"ckpt_component.integrations.accelerate needs accelerate ({error}): pip install 'ckpt_component[accelerate]'"
    ) from error

from ..checkpointer import Checkpointer
from ..config.following import deadlines
from ..config.resolve import resolve_config
from ..config.schema import Checkpoint
from ..errors import CheckpointConfigError, CheckpointNotFoundError, CheckpointTypeError
from ..factory import build_checkpointer
from ..managing.restore import wait_for_writers
from ..options import Verify
from ..storage.cleanup import discard, sweep
from ..storage.file_system import file_system
from ..storage.names import HUGGINGFACE
from .file_capture import FileCapture, files_writer

logger = logging.getLogger(__name__)

_NUMBERED = re.compile(r"checkpoint_(\d+)")


def save_in_background(
    accelerator: Any, checkpoint: Any = "async_persistent", overrides: Sequence[str] = ()
) -> Checkpointer | None:
    """From now on, `accelerator.save_state` returns once the state is copied; its files are written in the background.

    A new folder appears complete or not at all. `load_state` and `end_training` wait for the saves; the error of a
    failed save is raised by the next of these calls.

    Args:
        accelerator: the accelerator; call this once, on every rank.
        checkpoint: a preset's name, a config or a dict, as for `build_checkpointer`; the format is Accelerate's.
        overrides: as for `build_checkpointer`.

    Returns:
        The checkpointer, which `end_training` closes; None if the config has `enabled: false`.

    Raises:
        CheckpointConfigError: the config is wrong, or another program writes the checkpoints of this accelerator.
        CheckpointTypeError: `accelerator` is not an `Accelerator`.
    """
    if not isinstance(accelerator, Accelerator):
        raise CheckpointTypeError(f"save_in_background takes an Accelerator, got a {type(accelerator).__name__}.")
    if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise CheckpointConfigError(
            f"With {accelerator.distributed_type.value}, save_state has another program write the checkpoint; leave "
            "out save_in_background."
        )
    if "save_state" in vars(accelerator):
        raise CheckpointConfigError("save_in_background was called for this accelerator already; call it once.")
    settings = resolve_config(checkpoint, overrides)
    if not settings.enabled:
        return None
    settings.writer = files_writer(settings.writer)
    states = _BackgroundStates(accelerator, build_checkpointer(settings), settings)
    accelerator.save_state, accelerator.load_state = states.save_state, states.load_state
    accelerator.end_training = states.end_training
    return states.checkpointer


class _BackgroundStates:
    """The methods that replace those of an accelerator."""

    def __init__(self, accelerator: Any, checkpointer: Checkpointer, settings: Checkpoint) -> None:
        self.checkpointer = checkpointer
        self._accelerator = accelerator
        self._save, self._load, self._end = accelerator.save_state, accelerator.load_state, accelerator.end_training
        self._capture = FileCapture()
        self._settings = settings
        self._fs = file_system(durable=True)
        #: The future of the newest save; it ends after those of the earlier ones.
        self._newest: Future[Any] | None = None
        self._guarded = 0

    def save_state(self, output_dir: Any = None, *args: Any, **options: Any) -> str:
        """Like `Accelerator.save_state`; returns when the state may change. The folder must be new."""
        project = self._accelerator.project_configuration
        numbered, limit = project.automatic_checkpoint_naming, project.total_limit
        path = self._numbered(project.iteration) if numbered else os.path.abspath(_given(output_dir))
        optimizers = self._accelerator._optimizers[self._guarded :]
        self._guarded += len(optimizers)
        if optimizers:
            self.checkpointer.guard(optimizers)
        if self._accelerator.is_main_process:
            for name in sweep(self._fs, os.path.dirname(path), HUGGINGFACE):
                logger.info("deleted %s, which a dead run left", name)
        project.automatic_checkpoint_naming = False  # the original saves where it is told
        try:
            files = self._capture.files_of(lambda folder: self._save(folder, *args, **options), os.path.basename(path))
        finally:
            project.automatic_checkpoint_naming = numbered
        saved = self.checkpointer.save(files, path)
        self._newest = saved[1] if saved is not None else None
        if numbered and limit is not None and self._accelerator.is_main_process:
            if self._newest is None:
                self._delete_old(limit)
            else:
                self._newest.add_done_callback(lambda _: self._delete_old(limit))
        return path

    def load_state(self, input_dir: Any = None, *args: Any, **options: Any) -> None:
        """Like `Accelerator.load_state`, once all saves are committed; verifies the checksums first."""
        self.checkpointer.wait()
        numbered = input_dir is None and self._accelerator.project_configuration.automatic_checkpoint_naming
        path = self._numbered(0) if numbered else os.path.abspath(_given(input_dir))
        wait_for_writers(self._fs, os.path.dirname(path), HUGGINGFACE, self._settings.timeouts.close)
        if numbered:
            numbers = self._numbers()
            if not numbers:
                raise CheckpointNotFoundError(f"There is no checkpoint_<number> in {os.path.dirname(path)}.")
            path = self._numbered(numbers[-1])
        if self._settings.verify is not Verify.off and os.path.isdir(path):
            times = deadlines(self._settings)
            deadline = time.monotonic() + times["stage"] + times["write"]
            self.checkpointer.ranks.meet("load_state", None, lambda _: self.checkpointer.verify(path), deadline)
        self._load(path, *args, **options)

    def end_training(self) -> None:
        """Finish the saves, then do what `Accelerator.end_training` does."""
        self.checkpointer.close()
        self._end()

    def _numbered(self, number: int) -> str:
        return os.path.join(os.path.abspath(self._accelerator.project_dir), "checkpoints", f"checkpoint_{number}")

    def _numbers(self) -> list[int]:
        names = self._fs.names(os.path.dirname(self._numbered(0)))
        return sorted(int(match[1]) for match in map(_NUMBERED.fullmatch, names) if match)

    def _delete_old(self, limit: int) -> None:
        for number in self._numbers()[: -max(limit, 1)]:
            discard(self._fs, self._numbered(number))


def _given(folder: Any) -> Any:
    if folder is None:
        raise CheckpointConfigError(
            "Name the folder of the checkpoint, or use ProjectConfiguration(automatic_checkpoint_naming=True)."
        )
    return folder
