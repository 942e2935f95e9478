"""What a checkpointer saves and loads with, and how parts that are not ours take that place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, ClassVar, Protocol

from ..coordination import Coordinator, LocalCoordinator
from ..errors import CheckpointBusyError
from ..stagers.base import Stager
from ..storage.commit import refuse_existing
from .report import SaveReport


class CheckpointReader(Protocol):
    """What loads: gives the state dict, and the keys of the target that the checkpoint lacks."""

    def read(
        self, path: str, state_dict: Any = None, *, map_location: Any = None, allow_dtype_cast: bool = False
    ) -> tuple[dict[str, Any], list[str]]:
        """Read the checkpoint at `path`, into `state_dict` where one is given."""
        ...


class CheckpointWriter(Protocol):
    """What a synchronous checkpointer saves with."""

    def write(self, state_dict: Any, path: str) -> Any:
        """Return when the checkpoint is complete."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


class Saver(ABC):
    """What a checkpointer saves with: a `SavePipeline`, or parts that are not ours.

    Attributes:
        ranks: how the ranks agree.
        stager: ours; None for parts that are not.
        last_report: see `Checkpointer.last_report`.
    """

    #: Whether keywords of `save` that we do not know are passed to the parts.
    accepts_keywords: ClassVar[bool] = False
    ranks: Coordinator
    stager: Stager | None = None
    last_report: SaveReport | None = None

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether a save would have to wait for an earlier one."""

    @abstractmethod
    def save(
        self, state_dict: Mapping[Any, Any], path: str, *, may_wait: bool = True
    ) -> tuple[Future[None], Future[Any]]:
        """Save to an absolute path; see `Checkpointer.save`."""

    @abstractmethod
    def close(self) -> None:
        """Finish what was started and free everything; see `Checkpointer.close`."""


class ForeignSaver(Saver):
    """Saves with a foreign writer, and with a stager where there is one.

    Args:
        stager: anything whose `stage(state_dict)` gives the state to write, or a future of it; None: the state itself.
        writer: anything with `write(state, path)`, which returns when that is done or gives a future.
    """

    accepts_keywords = True

    def __init__(self, stager: Any, writer: Any) -> None:
        self.ranks = LocalCoordinator()
        self._stager = stager
        self._writer = writer
        self._last: Future[Any] | None = None

    @property
    def busy(self) -> bool:
        """Whether the last save still runs."""
        return self._last is not None and not self._last.done()

    def save(
        self, state_dict: Mapping[Any, Any], path: str, *, may_wait: bool = True, **kwargs: Any
    ) -> tuple[Future[None], Future[Any]]:
        """Stage and write. First waits for the last save: a stager has one buffer, which that must have left."""
        if not may_wait and self.busy:
            raise CheckpointBusyError(f"{path} came while an earlier save was still running")
        refuse_existing(path)
        last, self._last = self._last, None
        if last is not None:
            last.result()
        staged = state_dict if self._stager is None else self._stager.stage(state_dict, **kwargs)
        written = self._writer.write(staged, path, **kwargs)
        if isinstance(written, Future):
            self._last = written
        return _staged_future(staged), written

    def close(self) -> None:
        """Close both, and raise the error of a save that ended."""
        try:
            if self._stager is not None:
                self._stager.close()
        finally:
            self._writer.close()
        last, self._last = self._last, None
        if last is not None and last.done():
            last.result()


def _staged_future(staged: Any) -> Future[None]:
    """A future that is done, or fails, when a stager's result is complete."""
    future: Future[None] = Future()
    if not isinstance(staged, Future):
        future.set_result(None)
        return future

    def settle(done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    staged.add_done_callback(settle)
    return future
