"""What a checkpointer asks of parts that are not ours: a reader, a writer, and a stager that may give a future."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol


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


def staged_future(staged: Any) -> Future[None]:
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
