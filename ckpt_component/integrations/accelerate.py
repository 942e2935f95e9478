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
from functools import partial
from typing import Any

try:
    from accelerate import Accelerator, DistributedType
except ImportError as error:
    raise ImportError(
        f"ckpt_component.integrations.accelerate needs accelerate ({error}): pip install 'accelerate>=1.1'"
    ) from error

from ..checkpointer import Checkpointer
from ..config.rules import deadlines
from ..config.schema import Checkpoint
from ..core.commit.cleanup import Unfinished, discard, quarantine, wait_for_writers
from ..core.commit.names import HUGGINGFACE
from ..core.options import Verify
from ..core.storage.locate import file_storage
from ..errors import (
    CheckpointConfigError,
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointTypeError,
    CheckpointUnreadableError,
)
from ..factory.graph import build_checkpointer
from ..formats.named_files import FilesWriter
from .file_capture import FileCapture
from .settings import settings_of

logger = logging.getLogger(__name__)

_NUMBERED = re.compile(r"checkpoint_(\d+)")
_DECIDED = {
    "checkpoint.dir": "use save_state(folder), or ProjectConfiguration(project_dir=...)",
    "checkpoint.naming": "Accelerate names its folders checkpoint_<number>",
    "checkpoint.save": "call save_state when you want a checkpoint",
    "checkpoint.keep": "use ProjectConfiguration(total_limit=...)",
    "checkpoint.resume": "use load_state(folder)",
    "checkpoint/writer": "the files are those of Accelerate",
}


def save_in_background(
    accelerator: Any, checkpoint: Any = "async_persistent", overrides: Sequence[str] = ()
) -> Checkpointer | None:
    """From now on, `accelerator.save_state` returns once the state is copied; its files are written in the background.

    A new folder appears complete or not at all. `load_state` and `end_training` wait for the saves; the error of a
    failed save is raised by the next of these calls.

    Args:
        accelerator: the accelerator; call this once, on every rank
        checkpoint: a preset's name, a config or a dict, as for `build_checkpointer`; the format is Accelerate's
        overrides: as for `build_checkpointer`

    Returns:
        The checkpointer, which `end_training` closes; None if the config has `enabled: false`.

    Raises:
        CheckpointConfigError: the config is wrong, or another program writes the checkpoints of this accelerator
        CheckpointTypeError: `accelerator` is not an `Accelerator`
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
    settings = settings_of(checkpoint, overrides, _DECIDED, FilesWriter)
    if not settings.enabled:
        return None
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
        self._fs = file_storage()
        #: The future of the newest save; it ends after those of the earlier ones.
        self._newest: Future[Any] | None = None
        self._guarded = 0

    def save_state(self, output_dir: Any = None, *args: Any, **options: Any) -> str:
        """Like `Accelerator.save_state`; returns when the state may change. The folder must be new."""
        project = self._accelerator.project_configuration
        numbered, limit = project.automatic_checkpoint_naming, project.total_limit
        path = self._numbered(project.iteration) if numbered else _given(output_dir)
        optimizers = self._accelerator._optimizers[self._guarded :]
        self._guarded += len(optimizers)
        if optimizers:
            self.checkpointer.guard(optimizers)
        if self._accelerator.is_main_process:
            for name in Unfinished(self._fs, os.path.dirname(os.path.abspath(path)), HUGGINGFACE).sweep():
                logger.info("deleted %s, which a dead run left", name)
        project.automatic_checkpoint_naming = False  # so that it saves to the folder that it is given
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
        """Like `Accelerator.load_state`, once all saves are committed; verifies the checksums first.

        Without a folder it loads the newest numbered checkpoint, and the next save has the next number.
        A damaged one is set aside, and the one before is loaded.

        Raises:
            CheckpointNotFoundError: there is no numbered checkpoint
            CheckpointCorruptError: the checkpoint is damaged, and there is no other to load
        """
        self.checkpointer.wait()
        project = self._accelerator.project_configuration
        numbered = input_dir is None and project.automatic_checkpoint_naming
        path = self._numbered(0) if numbered else os.path.abspath(_given(input_dir))
        wait_for_writers(self._fs, os.path.dirname(path), HUGGINGFACE, self._settings.timeouts.close)
        times = deadlines(self._settings)
        deadline = time.monotonic() + times["stage"] + times["write"]
        choose = self._newest_whole if numbered else partial(self._verify, path)
        number = self.checkpointer.ranks.meet("load_state", None, lambda _: choose(), deadline)
        if numbered:
            path = self._numbered(number)
        self._load(path, *args, **options)
        if numbered:
            project.iteration = number + 1

    def end_training(self) -> None:
        """Finish the saves, then do what `Accelerator.end_training` does."""
        self.checkpointer.close()
        self._end()

    def _numbered(self, number: int) -> str:
        return os.path.join(os.path.abspath(self._accelerator.project_dir), "checkpoints", f"checkpoint_{number}")

    def _numbers(self) -> list[int]:
        names = self._fs.names(os.path.dirname(self._numbered(0)))
        return sorted(int(match[1]) for match in map(_NUMBERED.fullmatch, names) if match)

    def _verify(self, path: str) -> None:
        if self._settings.verify is not Verify.off and os.path.isdir(path):
            self.checkpointer.verify(path)

    def _newest_whole(self) -> int:
        """On the leading rank: the number of the newest checkpoint that is not damaged."""
        numbers = self._numbers()
        if not numbers:
            raise CheckpointNotFoundError(f"There is no checkpoint_<number> in {os.path.dirname(self._numbered(0))}.")
        for number in reversed(numbers):
            try:
                self._verify(self._numbered(number))
            except CheckpointCorruptError as error:
                if number == numbers[0] or isinstance(error, CheckpointUnreadableError):
                    raise
                kept = quarantine(self._fs, self._numbered(number))
                logger.error("%s It is now kept as %s, and an older checkpoint is loaded.", error, kept)
            else:
                break
        return number

    def _delete_old(self, limit: int) -> None:
        for number in self._numbers()[: -max(limit, 1)]:
            discard(self._fs, self._numbered(number))


def _given(folder: Any) -> str:
    if folder is None:
        raise CheckpointConfigError(
            "Name the folder of the checkpoint, or use ProjectConfiguration(automatic_checkpoint_naming=True)."
        )
    return str(os.path.expanduser(folder))
