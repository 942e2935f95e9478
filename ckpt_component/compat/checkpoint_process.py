"""A checkpoint writer in its own process.

The writer is any object with `write(state_dict, path, **kwargs)`. A function of the user builds it in the process,
which then calls it for every save. The process runs the loop of `worker_main`; its requests are `WorkerRequest`s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Protocol

from ..core.outside import Future
from ..errors import CheckpointError
from .pickling import pickle_by_value
from .spawn import ProcessContext
from .worker_client import FIX_FOR_SPAWN, WorkerClient
from .worker_main import serve


@dataclass
class RankInfo:
    """The rank and the world size."""

    global_rank: int
    global_world_size: int


@dataclass
class CheckpointProcessConfig:
    """Deadlines of a `CheckpointProcess`, in seconds.

    Attributes:
        subprocess_init_timeout_secs: for the process to start and to build its writer
        subprocess_shutdown_timeout_secs: for `close()`, including pending writes
        subprocess_write_timeout_secs: for one write. A process that takes longer is replaced.
    """

    subprocess_init_timeout_secs: float = 30
    subprocess_shutdown_timeout_secs: float = 60
    subprocess_write_timeout_secs: float = 1800


class RequestType(Enum):
    """The kinds of requests."""

    PING = "ping"
    WRITE_CHECKPOINT = "write_checkpoint"
    TERMINATE_PROCESS = "exit"


@dataclass
class WorkerRequest:
    """A request to the process. The payload of a write has `state_dict`, `path` and `kwargs`."""

    request_type: RequestType
    payload: dict[str, Any] = field(default_factory=dict)


@dataclass
class WorkerResponse:
    """The response to a successful request. The error of a failed one is raised by the trainer's future.

    The fields are torch's; only `request_type` and `success` are set here.
    """

    request_type: RequestType
    success: bool
    error_msg: str | None = None
    payload: dict[str, Any] | None = None


class CheckpointWriter(Protocol):
    """The interface of a writer. If it has `close()`, that is called at the end."""

    def write(self, state_dict: dict[str, Any], path: str, **kwargs: Any) -> Future[Any] | None:
        """Write one checkpoint. If it returns a future, the process waits for it."""


class CheckpointProcess:
    """Sends state dicts to a writer in another process.

    The process starts with this object, and is restarted for the next write after it died. A failed write leaves it
    running. Use as a context manager, or call `close()`.

    Args:
        rank_info: passed to the writer as argument `rank_info`, unless `checkpoint_writer_init_args` has one
        config: deadlines: a `CheckpointProcessConfig`, or torch's, which has no `subprocess_write_timeout_secs`; its
            default then holds
        subprocess_init_fn: called first in the process
        subprocess_init_args: its arguments
        checkpoint_writer_init_fn: called next in the process; returns the writer
        checkpoint_writer_init_args: its keyword arguments

    Attributes:
        process_creation_future: done when the first process has started; has the error if it could not start, such
            as a TimeoutError. Waiting for it is optional.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        config: CheckpointProcessConfig,
        subprocess_init_fn: Callable[..., Any],
        subprocess_init_args: tuple[Any, ...],
        checkpoint_writer_init_fn: Callable[..., CheckpointWriter],
        checkpoint_writer_init_args: Mapping[str, Any],
    ) -> None:
        self._config = config
        self._write_timeout = getattr(
            config, "subprocess_write_timeout_secs", CheckpointProcessConfig.subprocess_write_timeout_secs
        )
        writer_init_args = {"rank_info": rank_info, **checkpoint_writer_init_args}
        make_session = partial(
            _WriterSession, subprocess_init_fn, subprocess_init_args, checkpoint_writer_init_fn, writer_init_args
        )
        self._worker = WorkerClient(
            serve,
            (make_session,),
            name="checkpoint process",
            start_timeout=config.subprocess_init_timeout_secs,
            close_timeout=config.subprocess_shutdown_timeout_secs,
            farewell=_message(RequestType.TERMINATE_PROCESS),
        )
        self.process_creation_future: Future[None] = self._worker.submit(
            _message(RequestType.PING),
            timeout=config.subprocess_init_timeout_secs,
            what="the first ping",
            result_of=lambda _: None,
        )

    @property
    def process(self) -> ProcessContext | None:
        """The current or last process; None before the first."""
        return self._worker.context

    def write(self, state_dict: dict[str, Any] | Future[dict[str, Any]], path: str, **kwargs: Any) -> Future[None]:
        """Write a state dict in the process. Writes run in the order of these calls.

        Args:
            state_dict: what to write, copied by value before this returns; or a future of it, copied by value when
                it is done. Stage CUDA tensors to the host first. A tensor in shared memory (`share_memory_()`) is
                not copied: the writer uses the same memory and sees later changes.
            path: passed to the writer
            kwargs: passed to the writer

        Returns:
            A future, done when the write is. It fails with the error of this write: CheckpointSaveError with the
            traceback of the process, WorkerDiedError, CheckpointTimeoutError, or the error of the `state_dict` future.

        Raises:
            CheckpointStageError: a value cannot be pickled; the message names it
            CheckpointSaveError: this object is closed
        """
        shared: list[Any] = []  # tensors in shared memory, which must live until the process has taken them over

        def message(state: dict[str, Any]) -> bytes:
            payload = {"state_dict": state, "path": path, "kwargs": kwargs}
            return _message(RequestType.WRITE_CHECKPOINT, payload, shared)

        result = self._worker.submit(
            _mapped(state_dict, message) if isinstance(state_dict, Future) else message(state_dict),
            timeout=self._write_timeout,
            what=f"writing {path}",
            result_of=lambda _: None,
        )
        result.add_done_callback(lambda _: shared.clear())
        return result

    def close(self) -> None:
        """Finish pending writes and end the process, all within the shutdown timeout.

        Then unfinished writes fail, and the process is killed. Safe to call twice.
        """
        self._worker.close(self._config.subprocess_shutdown_timeout_secs)

    def __enter__(self) -> CheckpointProcess:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class _WriterSession:
    """Builds the writer in the process, and handles requests with it. Arguments as for `CheckpointProcess`."""

    def __init__(
        self,
        init_fn: Callable[..., Any],
        init_args: tuple[Any, ...],
        writer_init_fn: Callable[..., CheckpointWriter],
        writer_init_args: Mapping[str, Any],
    ) -> None:
        init_fn(*init_args)
        self._writer = writer_init_fn(**writer_init_args)

    def __call__(self, request: WorkerRequest) -> WorkerResponse:
        if request.request_type is RequestType.WRITE_CHECKPOINT:
            self._write(**request.payload)
        elif request.request_type is RequestType.TERMINATE_PROCESS:
            close = getattr(self._writer, "close", None)
            if close is not None:
                close()
        elif request.request_type is not RequestType.PING:
            names = ", ".join(kind.name for kind in RequestType)
            raise CheckpointError(f"There is no request type {request.request_type!r}; there are {names}.")
        return WorkerResponse(request.request_type, True)

    def _write(self, state_dict: dict[str, Any], path: str, kwargs: dict[str, Any]) -> None:
        result = self._writer.write(state_dict=state_dict, path=path, **kwargs)
        if isinstance(result, Future):
            result.result()  # bounded by the parent, which kills this process at the write's deadline


def _message(kind: RequestType, payload: dict[str, Any] | None = None, shared: list[Any] | None = None) -> bytes:
    request = WorkerRequest(kind, payload or {})
    what = "A request to the checkpoint process"
    return pickle_by_value(request, what, parts=request.payload, fix=FIX_FOR_SPAWN, shared=shared)


def _mapped(source: Future[Any], function: Callable[[Any], bytes]) -> Future[bytes]:
    """`function(source.result())` as a future; it runs in the thread that completes `source`."""
    message: Future[bytes] = Future()

    def provide(done: Future[Any]) -> None:
        try:
            message.set_result(function(done.result()))
        except BaseException as error:
            message.set_exception(error)

    source.add_done_callback(provide)
    return message
