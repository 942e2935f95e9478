"""`TemporalAsyncCaller`: a process per request, so that nothing runs between saves (seed 002)."""

from __future__ import annotations

import logging
from functools import partial

from ..errors import CheckpointSaveError
from ..process.call_loop import serve_calls, serve_inherited_call
from ..process.call_process import CallProcess, check_start_method
from ..process.call_worker import CallWorker
from ..process.snapshot import snapshot
from .async_caller import AsyncCaller, PendingCalls, name_of, payload_of, preload
from .request import AsyncRequest

_NAME = "temporal checkpoint process"


class TemporalAsyncCaller(AsyncCaller):
    """Starts a process for each request; several may run at the same time.

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

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Start a process for the request; see `AsyncCaller.schedule_async_call`."""
        check_start_method(self._start_method)  # CUDA may have come into use
        request = AsyncRequest.of(async_req)
        request.check()
        if request.async_fn is None:
            self._pending.add_over(request, None)
            return
        args = preload(request)
        if isinstance(args, CheckpointSaveError):
            self._pending.add_over(request, args)
            return
        if self._start_method == "fork":
            loop = partial(serve_inherited_call, function=request.async_fn, args=args, kwargs=request.async_fn_kwargs)
            payload = snapshot(None, name_of(request), parts={}, fix="")
        else:
            loop = partial(serve_calls, log_level=logging.getLogger("ckpt_component").getEffectiveLevel())
            payload = payload_of(request, args)
        make_process = partial(
            CallProcess, loop, start_method=self._start_method, start_timeout=self._start_timeout, name=_NAME
        )
        worker = CallWorker(make_process, start_timeout=self._start_timeout, close_timeout=self._close_timeout)
        try:
            worker.start()  # from here, so that a forked process has the state of this moment
        except CheckpointSaveError as error:
            self._pending.add_over(request, error)
            return
        result = worker.submit(payload, timeout=self._write_timeout, what=name_of(request))
        worker.finish()  # its process ends with this request
        self._pending.add(request, result, worker)

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """See `AsyncCaller.is_current_async_call_done`."""
        return self._pending.first_is_done(self, blocking, no_dist)

    def close(self, abort: bool = False) -> None:
        """Wait until the processes are done, or kill them; see `AsyncCaller.close`."""
        for worker in self._pending.workers():
            if abort:
                worker.abort()
            else:
                worker.close()
        if abort:
            self._pending.forget()
