"""`PersistentAsyncCaller`: one process for the whole run, which takes requests one after the other (seed 002)."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from .call_loop import serve_calls
from .call_process import CallProcess
from .call_worker import CallWorker
from .peers import this_rank
from .process_caller import ProcessCaller, ScheduledCall, payload_of
from .request import AsyncRequest

logger = logging.getLogger(__name__)

_NAME = "persistent checkpoint process"


class PersistentAsyncCaller(ProcessCaller):
    """Sends requests to one process, which is started with the first of them.

    Requests may wait for each other. One that fails fails alone; one that kills the process fails, and the next one
    gets a new process. With several ranks, a request that failed on another one is skipped here, or runs to its end if
    it has begun: the next one comes after it, so that the two never write at the same time.

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
        super().__init__(
            start_method, start_timeout=start_timeout, write_timeout=write_timeout, close_timeout=close_timeout
        )
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

    def _begin(self, request: AsyncRequest, args: tuple[Any, ...]) -> tuple[Future[Any], CallWorker]:
        payload = payload_of(request, args)
        worker = self._open_worker()
        return worker.submit(payload, timeout=self._write_timeout, what=request.name), worker

    def _give_up(self, call: ScheduledCall) -> None:
        call.result.cancel()  # does nothing to a call that runs

    def _take_workers(self) -> list[CallWorker]:
        worker, self._worker = self._worker, None
        return [] if worker is None else [worker]

    def _open_worker(self) -> CallWorker:
        if self._worker is None:
            log_level = logging.getLogger("ckpt_component").getEffectiveLevel()
            self._worker = CallWorker(
                partial(
                    CallProcess,
                    partial(PersistentAsyncCaller.async_loop, this_rank()),
                    (log_level,),
                    start_method=self._start_method,
                    start_timeout=self._start_timeout,
                    name=_NAME,
                ),
                start_timeout=self._start_timeout,
                close_timeout=self._close_timeout,
            )
        return self._worker
