"""The front objects: `save`, `load`, `close`, path by path.

Names and behaviour follow torch's experimental checkpointer (seed 003), with the argument order of that document:
`save(state_dict, path)`.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

from .coordination import Coordinator, LocalCoordinator
from .errors import CheckpointBusyError, CheckpointError, MissingKeysError, first_keys
from .saving.adapters import CheckpointReader, CheckpointWriter, staged_future
from .saving.blocking_writer import BlockingWriter
from .saving.deferred_errors import UntoldFailures
from .saving.paths import PathLike, absolute_path, new_path
from .saving.pipeline import EarlierSaveFailed, Saver
from .saving.report import SaveFuture, SaveReport
from .stagers.base import Stager
from .storage.fencing import Ownership

logger = logging.getLogger(__name__)

Self = TypeVar("Self", bound="Checkpointer")


class Checkpointer(ABC):
    """Saves and loads state dicts, path by path. A context manager; leaving it closes it."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._last_report: SaveReport | None = None

    @property
    def last_report(self) -> SaveReport | None:
        """The report of the last save that was committed, or None.

        With `on_error: warn` and `caller: inline` that of the last save, which may have failed.
        """
        return self._last_report

    @abstractmethod
    def save(
        self, state_dict: Mapping[Any, Any], path: PathLike, *, may_wait: bool = True
    ) -> tuple[Future[None], SaveFuture] | None:
        """Save a state dict as the checkpoint `path`.

        Args:
            state_dict: nested dicts and lists of tensors, plain values, and objects with `state_dict()`.
            path: a new folder. A path that exists is refused.
            may_wait: False: raise instead of waiting for the memory of an earlier save.

        Returns:
            None when the save is complete on return; else (stage_future, write_future): the first is done when
            the tensors may be changed, the second has the `SaveReport` when the checkpoint is committed.

        Raises:
            CheckpointStageError: a value that cannot be checkpointed, by key.
            CheckpointExistsError: the path is taken.
            CheckpointWorldError: the ranks are others than those that this was built for.
            CheckpointBusyError: with `may_wait=False`, when an earlier save is in the way; with several ranks on all.
            CheckpointError: what went wrong in an earlier save and was not yet told.
        """

    def load(
        self,
        path: PathLike,
        state_dict: dict[str, Any] | None = None,
        *,
        default_map_location: Any = None,
        strict: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Load a checkpoint: ours, or one of stock `dcp.save`, `torch.save` or safetensors.

        Args:
            path: its folder (or file).
            state_dict: the target. Its tensors are copied into, its plain values replaced, its objects with
                `load_state_dict()` given their state; keys that are not in it are not loaded. None: load everything.
            default_map_location: a device, or a function as `torch.load` takes it, for tensors without a target.
            strict: raise when the target has keys that the checkpoint lacks; False: one warning says which.
            **kwargs: passed to the reader; ours takes `allow_dtype_cast=True`, and `allow_unexpected=False` to refuse
                a checkpoint that has keys which the target lacks.

        Returns:
            The target, or a new dict.

        Raises:
            CheckpointNotFoundError: there is no checkpoint at the path.
            CheckpointWorldError: the ranks are others than those that this was built for.
            MissingKeysError: with `strict`.
            CheckpointLoadError: a value of another shape, dtype or kind than the target's, such as a dict for a list.
            UnexpectedKeysError: with `allow_unexpected=False`.
            CheckpointCorruptError: the bytes on disk are not those that were written.
        """
        self.ranks.world.check()
        logger.debug("loading %s", path)
        loaded, missing = self._reader.read(
            os.fspath(path), state_dict=state_dict, map_location=default_map_location, **kwargs
        )
        if missing:
            text = f"Checkpoint at {path} is missing {len(missing)} key(s) of the target: {first_keys(missing)}"
            if strict:
                raise MissingKeysError(f"{text}; strict=False leaves these values as they are.", missing)
            logger.warning("%s; these values are left as they are", text)
        return loaded

    def load_to_resume(
        self, path: PathLike, state_dict: dict[str, Any], *, strict: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Load what a run begins with: as `load`, and also verified where `verify` is `on_resume`."""
        from .readers import Reader  # imports torch

        # A reader of somebody else's has no such key.
        more = {"resuming": True} if isinstance(self._reader, Reader) else {}
        return self.load(path, state_dict, strict=strict, **kwargs, **more)

    def guard(self, optimizer: Any) -> None:
        """Let `optimizer.step()` wait for a snapshot that is still being copied. Needed by `zero_overhead` alone.

        Args:
            optimizer: a torch optimizer, a list of them, or a wrapper with the attribute `optimizer`.
        """

    def wait_staged(self, timeout: float | None = None) -> None:
        """Return when the tensors of the last save may be changed."""

    def prewarm(self, state_dict: Mapping[Any, Any]) -> None:
        """Plan and take memory for a state dict of this structure, so that the first save costs what others do."""

    def own(
        self,
        ownership: Ownership,
        admit: Callable[[str], None],
        after_commit: Callable[[str], None],
        after_save: Callable[[str], None],
    ) -> None:
        """Save only while this run owns the folder of checkpoints, which the first save takes over; see `Saver.own`."""
        saver = self._saver()
        if saver is not None:
            saver.own(ownership, admit, after_commit, after_save)

    @property
    def verifies(self) -> bool:
        """Whether `load_to_resume` compares checksums, where a checkpoint has any."""
        from .readers import Reader  # imports torch

        return isinstance(self._reader, Reader) and self._reader.verifies

    @property
    def ranks(self) -> Coordinator:
        """How the ranks agree."""
        saver = self._saver()
        return LocalCoordinator() if saver is None else saver.ranks

    def _saver(self) -> Saver | None:
        """The saver in the graph, where it is one of ours."""
        return None

    @property
    def busy(self) -> bool:
        """Whether a save would have to wait for an earlier one."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Finish what was started and free everything. Bounded; safe to call twice.

        Raises:
            CheckpointError: what went wrong in an earlier save and was not yet told.
        """

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            # The body's own exception goes on; this one must not hide it.
            logger.error("while closing the checkpointer: %s", failure)


class SyncCheckpointer(Checkpointer):
    """Saves while training waits.

    Args:
        writer: what saves; `BlockingWriter` from the factory.
        reader: what loads.
    """

    def __init__(self, writer: CheckpointWriter, reader: CheckpointReader) -> None:
        super().__init__(reader)
        self._writer = writer

    def save(self, state_dict: Mapping[Any, Any], path: PathLike, *, may_wait: bool = True, **kwargs: Any) -> None:
        """Save, and return when the checkpoint is committed; see `Checkpointer.save`."""
        ours = isinstance(self._writer, BlockingWriter)  # whose ranks look together whether the path is free
        if ours:
            _refuse_keywords(self, kwargs)
        target = absolute_path(path) if ours else new_path(path)
        result = self._writer.write(state_dict, target, **kwargs)
        if isinstance(result, SaveReport):
            self._last_report = result

    def prewarm(self, state_dict: Mapping[Any, Any]) -> None:
        """See `Checkpointer.prewarm`."""
        saver = self._saver()
        if saver is not None:
            saver.stager.prewarm(state_dict)

    def close(self) -> None:
        """Free what the writer holds."""
        self._writer.close()

    def _saver(self) -> Saver | None:
        return self._writer.saver if isinstance(self._writer, BlockingWriter) else None


class AsyncCheckpointer(Checkpointer):
    """Saves in the background.

    Args:
        checkpoint_stager: takes the snapshot: one of ours, or anything whose `stage(state_dict)` gives the state to
            write, or a future of it.
        checkpoint_process: writes it: a `Saver`, which then owns the stager, or a `CheckpointProcess` for stagers that
            give a state dict.
        reader: what loads.
    """

    def __init__(self, checkpoint_stager: Any, checkpoint_process: Any, reader: CheckpointReader) -> None:
        super().__init__(reader)
        self._checkpoint_stager = checkpoint_stager
        self._checkpoint_process = checkpoint_process
        saver = self._saver()
        self._untold = UntoldFailures(None if saver is None else saver.timeouts.max_stall)
        self._closed = False

    def save(
        self, state_dict: Mapping[Any, Any], path: PathLike, *, may_wait: bool = True, **kwargs: Any
    ) -> tuple[Future[None], SaveFuture]:
        """Take a snapshot and write it in the background; see `Checkpointer.save`.

        Waits for an earlier save only when all of the stager's memory is still being written.
        """
        saver = self._saver()
        if saver is None:
            if not may_wait and self.busy:
                raise CheckpointBusyError(f"{path} came while an earlier save was still running")
            staged, write_future = self._save_with_foreign_parts(state_dict, new_path(path), **kwargs)
        else:
            _refuse_keywords(self, kwargs)
            try:
                staged, write_future = saver.save(
                    state_dict, absolute_path(path), self._untold.by_number(), may_wait=may_wait
                )
            except EarlierSaveFailed as failure:
                raise self._untold.agreed(failure) from None
        write_future.add_done_callback(self._note_report)
        self._untold.watch(write_future)
        return staged_future(staged), write_future

    def _save_with_foreign_parts(self, state_dict: Mapping[Any, Any], target: str, **kwargs: Any) -> tuple[Any, Any]:
        self._untold.tell()
        # A foreign stager has one buffer, which the last save must have left before it is filled again.
        self._untold.wait_for_all()
        staged = self._checkpoint_stager.stage(state_dict, **kwargs)
        return staged, self._checkpoint_process.write(staged, target, **kwargs)

    def guard(self, optimizer: Any) -> None:
        """See `Checkpointer.guard`."""
        if isinstance(self._checkpoint_stager, Stager):
            self._checkpoint_stager.guard(optimizer)

    def wait_staged(self, timeout: float | None = None) -> None:
        """See `Checkpointer.wait_staged`."""
        if isinstance(self._checkpoint_stager, Stager):
            self._checkpoint_stager.wait_staged(timeout)

    def prewarm(self, state_dict: Mapping[Any, Any]) -> None:
        """See `Checkpointer.prewarm`."""
        if isinstance(self._checkpoint_stager, Stager):
            self._checkpoint_stager.prewarm(state_dict)

    @property
    def busy(self) -> bool:
        """See `Checkpointer.busy`."""
        if isinstance(self._checkpoint_stager, Stager):
            return self._checkpoint_stager.busy
        return self._untold.running

    def close(self) -> None:
        """Finish the saves that were started, end the writer process, free the memory."""
        if self._closed:
            return
        self._closed = True
        try:
            try:
                if self._saver() is None:
                    self._checkpoint_stager.close()
            finally:
                self._checkpoint_process.close()
        finally:
            self._untold.tell()

    def _saver(self) -> Saver | None:
        return self._checkpoint_process if isinstance(self._checkpoint_process, Saver) else None

    def _note_report(self, future: Future[Any]) -> None:
        if not future.cancelled() and Future.exception(future, timeout=0) is None:
            report = Future.result(future, timeout=0)
            if isinstance(report, SaveReport):
                self._last_report = report


def _refuse_keywords(checkpointer: Checkpointer, unknown: Mapping[str, Any]) -> None:
    """Parts of somebody else's are given keywords that only they know; ours know none."""
    if unknown:
        raise TypeError(
            f"{type(checkpointer).__name__}.save() got an unexpected keyword argument {next(iter(unknown))!r}; "
            "it takes state_dict, path and may_wait."
        )
