"""`PersistentAsyncCaller`: one process for the whole run, which takes requests one after the other (seed 002)."""

from __future__ import annotations

import logging
from functools import partial
from multiprocessing.connection import Connection

from ..errors import CheckpointSaveError
from ..process.call_loop import serve_calls
from ..process.call_process import CallProcess, check_start_method
from ..process.call_worker import CallWorker
from . import ranks
from .async_caller import AsyncCaller, PendingCalls, name_of, payload_of, preload
from .request import AsyncRequest

logger = logging.getLogger(__name__)

_NAME = "persistent checkpoint process"


class PersistentAsyncCaller(AsyncCaller):
    """Sends requests to one process, which is started with the first of them.

    Requests may wait for each other. One that fails fails alone; one that kills the process fails, and the next one
    gets a new process.

    Args:
        start_method: `spawn` or `forkserver`; `fork` is refused where CUDA is in use.
        start_timeout: seconds for the process to start.
        write_timeout: seconds for one request, from the moment when the process gets it.
        close_timeout: seconds for the process to leave when it is asked to.

    Raises:
        StartMethodError: `start_method` cannot be used.
    """

    def __init__(
        self,
        start_method: str = "spawn",
        *,
        start_timeout: float = 30.0,
        write_timeout: float = 1800.0,
        close_timeout: float = 60.0,
    ) -> None:
        check_start_method(start_method)
        self._start_method = start_method
        self._start_timeout = start_timeout
        self._write_timeout = write_timeout
        self._close_timeout = close_timeout
        self._pending = PendingCalls()
        self._worker: CallWorker | None = None

    @property
    def pid(self) -> int | None:
        """The process's id, or None when none runs."""
        process = self._worker.process if self._worker is not None else None
        return process.pid if process is not None else None

    def warm_up(self) -> None:
        """Start the process now, so that the first request need not wait for it. Does not wait itself.

        Raises:
            CheckpointSaveError: the system refused another process.
        """
        self._open_worker().start()

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Queue the request for the process; see `AsyncCaller.schedule_async_call`."""
        request = AsyncRequest.of(async_req)
        request.check()
        if request.async_fn is None:
            self._pending.add_over(request, None)
            return
        args = preload(request)
        if isinstance(args, CheckpointSaveError):
            self._pending.add_over(request, args)
            return
        payload = payload_of(request, args)
        worker = self._open_worker()
        result = worker.submit(payload, timeout=self._write_timeout, what=name_of(request))
        self._pending.add(request, result, worker)

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """See `AsyncCaller.is_current_async_call_done`."""
        return self._pending.first_is_done(self, blocking, no_dist)

    def close(self, abort: bool = False) -> None:
        """End the process when it has done its requests, or kill it; see `AsyncCaller.close`."""
        worker, self._worker = self._worker, None
        if worker is not None:
            if abort:
                worker.abort()
            else:
                worker.close()
        if abort:
            self._pending.forget()

    @staticmethod
    def async_loop(rank: int, connection: Connection, log_level: int = logging.INFO) -> None:
        """What the process runs: it takes requests from the trainer and answers each under its number.

        Args:
            rank: of the trainer.
            connection: to the trainer. It carries requests, results and errors; the reference has three queues here.
            log_level: of this package's loggers in the process.
        """
        logging.getLogger("ckpt_component").setLevel(log_level)
        logger.debug("persistent checkpoint process of rank %d", rank)
        serve_calls(connection, log_level)

    def _open_worker(self) -> CallWorker:
        if self._worker is None:
            log_level = logging.getLogger("ckpt_component").getEffectiveLevel()
            self._worker = CallWorker(
                partial(
                    CallProcess,
                    partial(PersistentAsyncCaller.async_loop, ranks.rank()),
                    (log_level,),
                    start_method=self._start_method,
                    start_timeout=self._start_timeout,
                    name=_NAME,
                ),
                start_timeout=self._start_timeout,
                close_timeout=self._close_timeout,
            )
        return self._worker
