"""Third-party parts of a checkpointer: the protocols they must satisfy, and a saver that uses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from ..core.commit.commit import refuse_existing
from ..core.coordination import LocalCoordinator
from ..core.options import ResolvedTimeouts
from ..core.outside import Future
from ..core.storage.locate import file_storage
from ..errors import CheckpointBusyError, CheckpointTimeoutError
from ..events import EventRecorder
from .save_queue import SaveFuture

_WHOLE_SAVE = ResolvedTimeouts().whole_save


class CheckpointReader(Protocol):
    """Loads checkpoints: returns the state dict, and the keys of the target that the checkpoint lacks."""

    def read(
        self, path: str, state_dict: Any = None, *, map_location: Any = None, allow_dtype_cast: bool = False
    ) -> tuple[dict[str, Any], list[str]]:
        """Read the checkpoint at `path`, into `state_dict` if one is given."""
        ...

    def verify(self, path: str) -> bool:
        """Verify the checksums of the checkpoint at `path`; False: it has none."""
        ...


class SynchronousWriter(Protocol):
    """Writes checkpoints for a synchronous checkpointer."""

    def write(self, state_dict: Any, path: str) -> Any:
        """Write a checkpoint, and return when it is complete."""
        ...

    def close(self) -> None:
        """Free all resources."""
        ...


class ForeignSaver:
    """Saves with a third-party writer, and optionally a stager.

    Args:
        stager: anything whose `stage(state_dict)` returns the state to write, or a future of it; None: no staging
        writer: anything with `write(state, path)`, which returns when it is done or returns a future
        limit: seconds to wait for the previous save

    Attributes:
        ranks: this rank only
        events: records loads; nothing of these saves
    """

    last_report = None

    def __init__(self, stager: Any, writer: Any, limit: float = _WHOLE_SAVE) -> None:
        self.ranks = LocalCoordinator()
        self.events = EventRecorder()
        self._limit = limit
        self._stager = stager
        self._writer = writer
        self._last: SaveFuture[Any] | None = None

    @property
    def busy(self) -> bool:
        """Whether the last save is still running."""
        return self._last is not None and not self._last.done()

    def save(
        self, state_dict: Mapping[Any, Any], path: str, *, may_wait: bool = True, **kwargs: Any
    ) -> tuple[Future[None], Future[Any]]:
        """Stage and write. First waits for the previous save, because a stager has only one buffer."""
        if not may_wait and self.busy:
            raise CheckpointBusyError(f"{path} came while an earlier save was still running")
        refuse_existing(file_storage(), path)
        self.wait()
        staged = state_dict if self._stager is None else self._stager.stage(state_dict, **kwargs)
        written = self._writer.write(staged, path, **kwargs)
        if isinstance(written, Future):
            self._last = written = _settled_like(written, SaveFuture(), lambda result: result)
        return _staged_future(staged), written

    def guard(self, optimizer: Any) -> None:
        """Third-party stagers have copied when `stage` returns."""

    def wait_staged(self, timeout: float | None = None) -> None:
        """See `guard`."""

    def prewarm(self, state_dict: Mapping[Any, Any], *, wait: bool = True) -> None:
        """There is nothing to prepare."""

    def wait(self) -> None:
        """Wait for the last save, and raise its error if it was not raised yet."""
        last = self._last
        if last is None:
            return
        if not self.ranks.outside.wait_for([last], self._limit):
            raise CheckpointTimeoutError(
                f"{type(self._writer).__name__} was still writing the previous save after {self._limit:g} s. Find out "
                "what it waits for, and save again."
            )
        self._last = None
        _raise_once(last)

    def close(self) -> None:
        """Close stager and writer, and raise the error of the last save if it has ended and was not raised yet."""
        try:
            if self._stager is not None:
                self._stager.close()
        finally:
            try:
                self._writer.close()
            finally:
                self.events.close(self._limit)
        last, self._last = self._last, None
        if last is not None and last.done():
            _raise_once(last)


def _raise_once(save: SaveFuture[Any]) -> None:
    """Raise the error of a save that has ended, unless its future has already given it."""
    if save.undelivered is not None:
        save.result(0)


def _staged_future(staged: Any) -> Future[None]:
    """Return a future that is done, or fails, when a stager's result is."""
    future: Future[None] = Future()
    if not isinstance(staged, Future):
        future.set_result(None)
        return future
    return _settled_like(staged, future, lambda _: None)


_AnyFuture = TypeVar("_AnyFuture", bound="Future[Any]")


def _settled_like(source: Future[Any], future: _AnyFuture, value_of: Callable[[Any], Any]) -> _AnyFuture:
    """Return `future`, which ends when `source` does: with a value of its result, or with its error."""

    def settle(done: Future[Any]) -> None:
        try:
            future.set_result(value_of(done.result(0)))
        except BaseException as error:
            future.set_exception(error)

    source.add_done_callback(settle)
    return future
