"""`TemporalAsyncCaller`: a process per request, so that nothing runs between saves (seed 002)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from .call_loop import serve_calls, serve_inherited_call
from .call_process import CallProcess, check_start_method
from .call_worker import CallWorker
from .pickling import snapshot
from .process_caller import ProcessCaller, ScheduledCall, payload_of
from .request import AsyncRequest

_NAME = "temporal checkpoint process"


class TemporalAsyncCaller(ProcessCaller):
    """Starts a process for each request; several may run at the same time.

    With several ranks, a request that failed on another one is killed here, so that nothing writes into a save that is
    over.

    Args:
        start_method: `spawn` or `forkserver` import the modules of `async_fn` afresh, which takes seconds where they
            import torch. `fork` starts in milliseconds and pickles nothing, but makes the next update of the weights
            slow, page by page, shares memory that was shared before, and is refused where CUDA is in use.
        start_timeout: seconds for a process to start.
        write_timeout: seconds for one request.
        close_timeout: seconds for a process to leave when it is done.

    Raises:
        StartMethodError: `start_method` cannot be used.
    """

    def _begin(self, request: AsyncRequest, args: tuple[Any, ...]) -> tuple[Future[Any], CallWorker]:
        check_start_method(self._start_method)  # CUDA may have come into use
        loop: Callable[..., None]
        if self._start_method == "fork":
            function: Any = request.async_fn
            loop = partial(serve_inherited_call, function=function, args=args, kwargs=request.async_fn_kwargs)
            payload = snapshot(None, request.name, parts={}, fix="")
        else:
            loop = partial(serve_calls, log_level=logging.getLogger("ckpt_component").getEffectiveLevel())
            payload = payload_of(request, args)
        make_process = partial(
            CallProcess, loop, start_method=self._start_method, start_timeout=self._start_timeout, name=_NAME
        )
        worker = CallWorker(make_process, start_timeout=self._start_timeout, close_timeout=self._close_timeout)
        worker.start()  # from here, so that a forked process has the state of this moment
        result = worker.submit(payload, timeout=self._write_timeout, what=request.name)
        worker.finish()  # its process ends with this request
        return result, worker

    def _give_up(self, call: ScheduledCall) -> None:
        if call.worker is not None:
            call.worker.abort()

    def _take_workers(self) -> list[CallWorker]:
        return [call.worker for call in self._calls if call.worker is not None]
