"""The user-facing checkpointers: `save`, `load` and `close`, path by path.

Names and behaviour follow torch's experimental checkpointer, with the argument order `save(state_dict, path)`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from types import TracebackType
from typing import Any, TypeVar

from .core.commit.names import step_in_name
from .core.commit.run_record import other_script
from .core.coordination import Coordinator
from .core.outside import Future
from .core.processes.running import OwnerProcess, refuse_at_exit
from .core.storage.locate import absolute, expanded, path_text
from .errors import CheckpointError, CheckpointTypeError, MissingKeysError, missing_keys
from .events import CheckpointListener, LoadReport, SaveReport
from .loading import Reader
from .saving.adapters import CheckpointReader, ForeignSaver, SynchronousWriter
from .saving.pipeline import SavePipeline

logger = logging.getLogger(__name__)

Self = TypeVar("Self", bound="Checkpointer")
PathLike = str | os.PathLike[str]


class Checkpointer(ABC):
    """Saves and loads state dicts, path by path. A context manager; leaving it closes it.

    Once it is closed, `save`, `load` and `prewarm` raise CheckpointError. In a child of `os.fork`, so does `wait`, and
    `close` does nothing.

    Attributes:
        last_load: the report of the last load; None: there was none, or it failed
    """

    def __init__(self, saver: SavePipeline | ForeignSaver, reader: CheckpointReader) -> None:
        self.saver = saver
        self._reader = reader
        self.last_load: LoadReport | None = None
        self._owner = OwnerProcess("checkpointer")

    @property
    def last_report(self) -> SaveReport | None:
        """The report of the last save that was committed, or None.

        With `on_error: warn` and `caller: inline`, the report of the last save, which may have failed.
        """
        return self.saver.last_report

    @abstractmethod
    def save(
        self, state_dict: Mapping[Any, Any], path: PathLike, *, may_wait: bool = True
    ) -> tuple[Future[None], Future[Any]] | None:
        """Save a state dict as the checkpoint `path`.

        Args:
            state_dict: nested dicts and lists of tensors, plain values, and objects with `state_dict()`
            path: a new folder. A path that exists is refused.
            may_wait: False: raise instead of waiting for the memory of an earlier save

        Returns:
            None if the save is complete on return; else (stage_future, write_future): the first is done when the
            tensors may be changed, the second has the `SaveReport` when the checkpoint is committed.

        Raises:
            CheckpointStageError: a value that cannot be checkpointed, by key
            CheckpointExistsError: the path is taken
            CheckpointWorldError: the process group is not the one that this was built with
            CheckpointBusyError: `may_wait=False`, and the save would have to wait for an earlier one; on all ranks
            CheckpointError: an earlier save failed, and its error was not raised yet
        """

    def load(
        self,
        path: PathLike,
        state_dict: Any = None,
        *,
        default_map_location: Any = None,
        strict: bool = False,
        rename: Mapping[str, str] | None = None,
        prefix: str = "",
        ignore: Sequence[str] = (),
        alone: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Load a checkpoint: a native one, or one of `torch.save`, DCP, Megatron, Lightning or Hugging Face.

        With several ranks, all of them call it, each with its own state and path. No object takes its state before
        every rank has read what it needs, and the call returns, or raises an error, on all of them. Objects take
        their states in the order of their keys, which is the same on all ranks.

        Args:
            path: its folder (or file), or a folder of checkpoints with a pointer file, for the newest of them
            state_dict: the target, a dict or a module. Its tensors are copied into, its plain values replaced, and its
                objects with `load_state_dict()` given their state; other keys are not loaded. Modules on the meta
                device get memory, see `checkpoint.load.device`. None: load everything.
            default_map_location: a device, or a function as `torch.load` takes it, for tensors without a target. None:
                the CPU, whatever torch's default device is.
            strict: raise if the target has keys that the checkpoint lacks; False: warn once, with the keys, unless
                they are on the meta device
            rename: names in the checkpoint -> in the target, such as `{"transformer.h": "blocks"}`. A name stands for
                its value and all below it, and `*` for any text: `{"h.*.attn": "blocks.*.attention"}`. An empty name
                of the target takes the name away. Each key is renamed once, by the longest name that fits.
            prefix: name to put before all keys, after the renames: `model` loads a plain state dict into
                `{"model": model}`
            ignore: names in the checkpoint, or else in the target, that are not loaded: the target keeps its values
            alone: this rank loads its part by itself, and waits for no other
            **kwargs: passed to the reader; the native one takes `allow_dtype_cast=True`, `allow_unexpected=False` to
                refuse a checkpoint with keys that the target lacks, and `resuming=True` to verify also if `verify` is
                `on_resume`

        Returns:
            The target, or a new dict.

        Raises:
            CheckpointNotFoundError: there is no checkpoint at the path
            CheckpointWorldError: the process group is not the one that this was built with
            CheckpointLoadError: values have another shape, dtype or kind than the target's, such as a dict for a list;
                or a name of `rename` or `ignore` fits no key. One error names all that does not fit, and nothing was
                loaded: MissingKeysError if, with `strict`, keys of the target are missing, else UnexpectedKeysError
                if, with `allow_unexpected=False`, the checkpoint has keys that the target lacks.
            CheckpointCorruptError: the bytes on disk differ from those that were written. This or another
                CheckpointError, with the rank in its text: another rank could not load.
            CheckpointTimeoutError: another rank did not make the call within `timeouts.stage`
            RanksError: another rank is dead, or has continued without this call
        """
        self._owner.check()
        self.ranks.check_world()
        logger.debug("loading %s", path)
        if isinstance(self._reader, Reader):
            kwargs.update(strict=strict, alone=alone)
        names = {"rename": rename, "prefix": prefix, "ignore": ignore}
        kwargs.update((name, value) for name, value in names.items() if value)
        text = path_text(path)
        with _naming_script(text), self._recorded_load(text):
            try:
                loaded, missing = self._reader.read(
                    text, state_dict=state_dict, map_location=default_map_location, **kwargs
                )
            except RuntimeError as error:
                refuse_at_exit(error)
                raise
        if self.last_load is not None and not kwargs.get("resuming"):
            self.saver.events.restored(self.last_load)
        if missing:
            text = f"Checkpoint at {path} {missing_keys(missing)}"
            if strict:
                raise MissingKeysError(f"{text}; strict=False leaves these values as they are.", missing)
            logger.warning("%s; these values are left as they are", text)
        return loaded

    @contextlib.contextmanager
    def _recorded_load(self, path: str) -> Iterator[None]:
        """Record a load that succeeds or fails; sets `last_load` if it succeeds."""
        self.last_load = None
        step = step_in_name(os.path.basename(os.path.normpath(path)))
        report = LoadReport(path=path, outcome="failed", step=step, time=self.ranks.outside.date())
        started = perf_counter()
        try:
            yield
        except Exception as error:
            self.saver.events.loaded(replace(report, error=str(error), seconds=perf_counter() - started))
            raise
        seconds, last_read = perf_counter() - started, getattr(self._reader, "last_read", {})
        self.last_load = replace(report, outcome="loaded", seconds=seconds, **last_read)
        self.saver.events.loaded(self.last_load)

    def add_listener(self, listener: CheckpointListener) -> None:
        """Call a listener for the saves and loads from now on; see `CheckpointListener`.

        Raises:
            CheckpointTypeError: it is none
        """
        self.saver.events.add_listener(listener)

    def verify(self, path: PathLike) -> bool:
        """Read a whole checkpoint, loading nothing, and compare its checksums.

        Returns:
            False if it has no checksums, because another program saved it.

        Raises:
            CheckpointCorruptError: a file is missing or differs from what was written; names the file
        """
        return bool(self._reader.verify(path_text(path)))

    def guard(self, optimizer: Any) -> None:
        """Make `optimizer.step()` wait for a snapshot that is still being copied.

        Only `zero_overhead` needs it, and only for optimizers that are not in the state.

        Args:
            optimizer: a torch optimizer, a list of them, or a wrapper with the attribute `optimizer`
        """
        self.saver.guard(optimizer)

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until the tensors of the last save may be changed."""
        self.saver.wait_staged(timeout)

    def wait(self) -> None:
        """Wait until every save that was started is committed, or raise the error of one that failed.

        Raises:
            CheckpointTimeoutError: a save hung; see timeouts.write
            CheckpointError: a save failed, and its error was not raised yet
        """
        self._owner.check(may_be_closed=True)
        self.saver.wait()

    def prewarm(self, state_dict: Mapping[Any, Any]) -> None:
        """Plan and allocate memory for a state dict of this structure, so that the first save is as fast as others."""
        self._owner.check()
        self.saver.prewarm(state_dict)

    @property
    def verifies(self) -> bool:
        """Whether a run that resumes verifies checksums, if the checkpoint has any."""
        return getattr(self._reader, "verifies", False)

    @property
    def ranks(self) -> Coordinator:
        """The coordinator of the ranks."""
        return self.saver.ranks

    @property
    def busy(self) -> bool:
        """Whether a save would have to wait for an earlier one."""
        return self.saver.busy

    def close(self) -> None:
        """Finish the saves in flight and free all resources. Bounded; safe to call twice.

        Does nothing in a forked child: all this belongs to the process that built it.

        Raises:
            CheckpointError: an earlier save failed, and its error was not raised yet
        """
        if not self._owner.closed and self._owner.is_here:
            self._owner.closed = True
            try:
                self.saver.close()
            finally:
                if isinstance(self._reader, Reader):
                    self._reader.close()

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
            # The exception of the body propagates; this one must not hide it.
            logger.error("while closing the checkpointer: %s", failure)


@contextlib.contextmanager
def _naming_script(path: str) -> Iterator[None]:
    """Say of a checkpoint that lacks keys which other script saved it: the folder may be that of another run."""
    try:
        yield
    except MissingKeysError as error:
        script = other_script(path)
        if script is None:
            raise
        raise MissingKeysError(f"{error} Another script saved it: {script}.", error.keys, error.advice) from None


class SyncCheckpointer(Checkpointer):
    """Saves while training waits.

    Args:
        writer: a `SavePipeline`, or anything with `write(state_dict, path)` and `close()`
        reader: loads checkpoints
    """

    def __init__(self, writer: SavePipeline | SynchronousWriter, reader: CheckpointReader) -> None:
        super().__init__(writer if isinstance(writer, SavePipeline) else ForeignSaver(None, writer), reader)

    def save(self, state_dict: Mapping[Any, Any], path: PathLike, *, may_wait: bool = True, **kwargs: Any) -> None:
        """Save, and return when the checkpoint is committed; see `Checkpointer.save`."""
        self._owner.check()
        self.saver.save(state_dict, _absolute(path), may_wait=may_wait, **kwargs)


class AsyncCheckpointer(Checkpointer):
    """Saves in the background.

    Args:
        checkpoint_stager: takes the snapshot: a `Stager`, or anything whose `stage(state_dict)` returns the state to
            write, or a future of it
        checkpoint_process: writes it: a `SavePipeline`, which owns the stager, or a `CheckpointProcess` for stagers
            that return a state dict
        reader: loads checkpoints
    """

    def __init__(self, checkpoint_stager: Any, checkpoint_process: Any, reader: CheckpointReader) -> None:
        native = isinstance(checkpoint_process, SavePipeline)
        super().__init__(checkpoint_process if native else ForeignSaver(checkpoint_stager, checkpoint_process), reader)

    def save(
        self, state_dict: Mapping[Any, Any], path: PathLike, *, may_wait: bool = True, **kwargs: Any
    ) -> tuple[Future[None], Future[Any]]:
        """Take a snapshot and write it in the background; see `Checkpointer.save`.

        Waits for an earlier save only if all of the stager's memory is in use.
        """
        self._owner.check()
        return self.saver.save(state_dict, _absolute(path), may_wait=may_wait, **kwargs)


def _absolute(path: PathLike) -> str:
    """Make a path absolute. Raises CheckpointConfigError for a variable that is not set."""
    if isinstance(path, Mapping):
        raise CheckpointTypeError("The state comes first: save(state, path).")
    text = path_text(path)
    if text.startswith("~") or "$" in text:
        text = expanded(text, "path")
    return absolute(text)
