"""`AsyncCallsQueue`: schedules requests, and finalizes them in order on all ranks."""

from __future__ import annotations

import logging
import os
import weakref
from collections import deque
from typing import Any, NamedTuple

from ..core.options import IoPriority
from ..core.processes.running import OwnerProcess
from ..errors import CheckpointError, CheckpointSaveError
from .async_callers import AsyncCaller, PersistentAsyncCaller, TemporalAsyncCaller
from .async_request import AsyncRequest
from .peers import PeerSession
from .spawn import at_the_end_of
from .torch_errors import as_checkpoint_exception

logger = logging.getLogger(__name__)

#: Priority among the exit handlers of multiprocessing: before those of the worker processes.
_EXIT_PRIORITY = 30

#: The caller of `warmup_persistent_caller` with the pid of this process, until a queue uses its worker process. The
#: static method of the reference requires such a place; the reference keeps it in a class attribute.
_warmed_up: list[tuple[int, PersistentAsyncCaller]] = []
#: All queues of this process; `abort_nvrx_checkpoint` of NVRx closes them.
_queues: weakref.WeakSet[AsyncCallsQueue] = weakref.WeakSet()


class _ActiveAsyncRequest(NamedTuple):
    """A scheduled request that is not yet finalized."""

    idx: int
    async_caller: AsyncCaller
    async_request: AsyncRequest


class AsyncCallsQueue:
    """Runs requests in the background and calls their finalize functions on the trainer, in order.

    Methods whose docstring says so must be called on all ranks in the same order. The ranks agree by small messages in
    the store of `torch.distributed`, without collectives or device work. If a rank's process dies, requests fail on the
    others within about half a minute; if it is alive but does not call, at the deadline of the request.

    The queues of the ranks are matched in the order of their first call that involves all ranks. A rank may also have a
    queue of its own, if it always passes `no_dist=True` and closes the queue when it is empty.

    Errors are also torch's `CheckpointException`, with its `failures` by rank.

    At interpreter exit, a queue that was not closed finalizes its requests if there is one rank. With several ranks,
    the script must do that.

    Args:
        persistent: one process for all requests, instead of one for each
        start_method: how processes are started; see the callers
        start_timeout: seconds for a process to start
        write_timeout: seconds for one request
        close_timeout: seconds for a process to exit when it is asked to
        cpu_priority: CPU priority of the processes, 0 to 19; 19 is the lowest
        io_priority: I/O priority of the processes; see `warmup_persistent_caller`
        cpu_shm_mode: as in NVRx; has no effect, because tensors are always copied to shared host memory
        is_daemon: as in NVRx; has no effect, because a process ends with this one and may start others
        sigterm_timeout: as in NVRx; has no effect, because `close(abort=True)` kills at once
        import_main: whether processes import the main script; requests with functions defined there need it

    Raises:
        StartMethodError: `start_method` cannot be used
        CheckpointConfigError: a priority is out of range
    """

    def __init__(
        self,
        persistent: bool = False,
        *,
        start_method: str = "spawn",
        start_timeout: float = 30.0,
        write_timeout: float = 1800.0,
        close_timeout: float = 60.0,
        cpu_priority: int = 0,
        io_priority: int | IoPriority | None = None,
        cpu_shm_mode: bool = False,
        is_daemon: bool = True,
        sigterm_timeout: float = 30.0,
        import_main: bool = True,
    ) -> None:
        self.persistent = persistent
        self.call_idx = -1
        self.async_calls: deque[_ActiveAsyncRequest] = deque()
        self._write_timeout = write_timeout
        kind = PersistentAsyncCaller if persistent else TemporalAsyncCaller
        self._caller = kind(
            start_method,
            start_timeout=start_timeout,
            write_timeout=write_timeout,
            close_timeout=close_timeout,
            nice=cpu_priority,
            io_priority=IoPriority.of_ionice_class(io_priority),
            import_main=import_main,
        )
        self._unreported: list[int] = []
        self._owner = OwnerProcess("queue")
        _queues.add(self)
        at_the_end_of(self, _EXIT_PRIORITY, _at_the_end, weakref.ref(self), self.async_calls)

    @staticmethod
    def get_instances() -> list[AsyncCallsQueue]:
        """Return all queues of this process."""
        return list(_queues)

    @staticmethod
    def warmup_persistent_caller(
        rank: int = 0,
        mp_mode: str = "spawn",
        cpu_priority: int = 10,
        io_priority: int | IoPriority | None = None,
        cpu_shm_mode: bool = False,
        otel_bootstrap: Any = None,
        start_timeout: float = 30.0,
        write_timeout: float = 1800.0,
        close_timeout: float = 60.0,
        import_main: bool = True,
        is_daemon: bool = True,
        sigterm_timeout: float = 30.0,
    ) -> None:
        """Start a worker process now, for the next persistent queue that schedules a request and has none.

        Args:
            rank: as in the reference; not used
            mp_mode: start method; `spawn` is used for `fork`, which would copy the trainer
            cpu_priority: CPU priority of the process, 0 to 19; 19 is the lowest
            io_priority: class of `ionice`: 3 is idle, 2 the lowest best-effort level, any other is normal
            cpu_shm_mode: as in NVRx; has no effect
            otel_bootstrap: as in NVRx; has no effect, because the process reports no spans
            start_timeout: see the constructor; the same for the next three
            write_timeout: see above
            close_timeout: see above
            import_main: see above
            is_daemon: as in the constructor; has no effect
            sigterm_timeout: as in the constructor; has no effect

        Raises:
            CheckpointSaveError: the system refused to start another process
        """
        if _warm_caller() is not None:
            return
        caller = PersistentAsyncCaller(
            "spawn" if mp_mode == "fork" else mp_mode,
            start_timeout=start_timeout,
            write_timeout=write_timeout,
            close_timeout=close_timeout,
            nice=cpu_priority,
            io_priority=IoPriority.of_ionice_class(io_priority),
            import_main=import_main,
        )
        caller.warm_up()
        _warmed_up[:] = [(os.getpid(), caller)]

    @as_checkpoint_exception()
    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Start a request in the background. Call this on all ranks.

        Args:
            async_request: a request of this package, megatron-core or NVRx. Later changes to its arguments and finalize
                functions have no effect.

        Returns:
            The number of the request, counted from 0, which `maybe_finalize_async_calls` returns when it is done.

        Raises:
            CheckpointStageError: with one rank, a part of it cannot be sent to another process; nothing is scheduled.
                With several ranks, no rank waits here for the others: the request gets its number on all ranks, and
                `maybe_finalize_async_calls` raises the error on all of them.
            RanksError: the store of the ranks cannot be reached
        """
        self._owner.check()
        idx = self.call_idx + 1
        caller = self._get_async_caller()
        request = AsyncRequest.of(async_request).freeze()._replace(call_idx=idx)
        caller.schedule_async_call(request._replace(finalize_fns=[]))
        self.call_idx = idx
        # The arguments are no longer needed here, and may be as large as the model.
        remainder = request._replace(async_fn=None, async_fn_args=(), async_fn_kwargs={}, preload_fn=None)
        self.async_calls.append(_ActiveAsyncRequest(idx, caller, remainder))
        return idx

    @as_checkpoint_exception()
    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalize finished requests, oldest first, up to the first unfinished one. Call this on all ranks.

        All ranks get the same answer in the n-th call and finalize the same requests in it. They wait for each other
        only if there is something to finalize, until all have done so.

        Args:
            blocking: wait for all of them, each at most until its deadline
            no_dist: look only at this rank

        Returns:
            Numbers of the requests finalized since the last return.

        Raises:
            CheckpointSaveError: a request or a finalize function failed. It is raised once, and that request is over;
                call again for later ones. With several ranks it is the same RanksError on all of them, caused by the
                rank's own error where it failed.
            CheckpointTimeoutError: rank 0 did not decide in time
        """
        self._owner.check()
        while self.async_calls:
            active = self.async_calls[0]
            try:
                if not active.async_caller.is_current_async_call_done(blocking, no_dist):
                    break
            except CheckpointError:
                self.async_calls.popleft()
                raise
            self.async_calls.popleft()
            self._finalize(active, None if no_dist else self._caller.peers.current)
            self._unreported.append(active.idx)
        finalized, self._unreported = self._unreported, []
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        """Number of requests that are scheduled and not yet finalized."""
        return len(self.async_calls)

    @as_checkpoint_exception()
    def close(self, abort: bool = False) -> None:
        """Finalize all requests and end all processes. Call this on all ranks.

        Bounded, safe to call twice, and the queue can be used again. Does nothing in a forked child.

        Args:
            abort: kill the processes now and discard their requests; no finalize function is called

        Raises:
            CheckpointSaveError: a request failed. The first such error is raised at the end; others are logged.
        """
        if not self._owner.is_here:
            return
        errors: list[CheckpointError] = []
        try:
            while self.async_calls and not abort:
                try:
                    self.maybe_finalize_async_calls(blocking=True)
                except CheckpointError as error:
                    if errors:
                        logger.error("%s", error)
                    errors.append(error)
        finally:
            self.async_calls.clear()
            self._caller.close(abort=abort)
            if (warm := _warm_caller()) is not None:
                warm.close(abort=abort)
        if errors:
            raise errors[0]

    def _get_async_caller(self) -> AsyncCaller:
        """The caller that runs the requests, with the process of `warmup_persistent_caller` if it has none yet.

        The reference has it under this name, and scripts call it to look at the caller.
        """
        if isinstance(self._caller, PersistentAsyncCaller) and (warm := _warm_caller()) is not None:
            self._caller.take_over(warm)
        return self._caller

    def _finalize(self, active: _ActiveAsyncRequest, session: PeerSession | None) -> None:
        what = f"Finalizing request {active.idx}"

        def finalize() -> None:
            for fn in active.async_request.finalize_fns:
                try:
                    fn()
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # torch's CheckpointException is not an Exception
                    text = f"{what} failed: {type(error).__name__}: {error}"
                    raise CheckpointSaveError(text, getattr(error, "errno", None)) from error

        if session is None:
            finalize()
        else:
            session.run_step(f"finalize/{active.idx}", finalize, what, self._write_timeout)


def _warm_caller() -> PersistentAsyncCaller | None:
    """The caller of `warmup_persistent_caller`, if it still has its process."""
    # A forked child has a copy of the list but does not own the process.
    return next((caller for pid, caller in _warmed_up if pid == os.getpid() and caller.pid is not None), None)


def _at_the_end(reference: weakref.ref[AsyncCallsQueue], calls: deque[_ActiveAsyncRequest]) -> None:
    """Close a queue that was collected, or at interpreter exit."""
    queue = reference()
    if queue is None:
        if calls:
            logger.error("a queue was dropped with %d requests that were not finalized; call its close()", len(calls))
    elif calls and queue._caller.peers.current is not None:
        # All ranks finalize together, and others may have exited already.
        text = "the interpreter exits with %d requests that were not finalized; call close() on all ranks first"
        logger.error(text, len(calls))
    else:
        try:
            queue.close()
        except CheckpointError:
            logger.exception("a request failed, and the script ended without asking for it")
