"""`AsyncCallsQueue`: schedules requests, and finalizes them in order on all ranks."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from multiprocessing.util import Finalize
from typing import NamedTuple

from ..errors import CheckpointError, CheckpointSaveError
from .async_callers import AsyncCaller, PersistentAsyncCaller, TemporalAsyncCaller
from .async_request import AsyncRequest
from .peers import PeerSession
from .torch_errors import as_checkpoint_exception

logger = logging.getLogger(__name__)

#: Among the exit handlers of multiprocessing: before those of the processes that the requests run in.
_EXIT_PRIORITY = 30


class _ActiveAsyncRequest(NamedTuple):
    """A request that is scheduled and not yet finalized."""

    idx: int
    async_caller: AsyncCaller
    async_request: AsyncRequest


class AsyncCallsQueue:
    """Runs requests in the background and calls their finalize functions on the trainer, in order.

    All methods that say so must be called on all ranks, in the same order. They agree by small messages in the store of
    `torch.distributed`: no collective, nothing on a device. A rank whose process has died fails the requests of the
    others within about half a minute; one that lives but does not call, when the deadline of the request is over.

    The queues of the ranks belong together in the order in which they are first asked on all ranks. So a rank may have
    a queue of its own, which it asks with `no_dist=True` alone, and closes when nothing is left in it.

    Errors are also torch's `CheckpointException`, with its `failures` by rank.

    When the interpreter exits, a queue that was not closed finalizes what is left, if there is one rank; with several,
    that is for their scripts to do together.

    Args:
        persistent: one process for all requests, instead of one for each.
        start_method: how processes are started; see the callers.
        start_timeout: seconds for a process to start.
        write_timeout: seconds for one request.
        close_timeout: seconds for a process to leave when it is asked to.

    Raises:
        StartMethodError: `start_method` cannot be used.
    """

    def __init__(
        self,
        persistent: bool = False,
        *,
        start_method: str = "spawn",
        start_timeout: float = 30.0,
        write_timeout: float = 1800.0,
        close_timeout: float = 60.0,
    ) -> None:
        self.persistent = persistent
        self.call_idx = -1
        self.async_calls: deque[_ActiveAsyncRequest] = deque()
        self._write_timeout = write_timeout
        kind = PersistentAsyncCaller if persistent else TemporalAsyncCaller
        self._caller = kind(
            start_method, start_timeout=start_timeout, write_timeout=write_timeout, close_timeout=close_timeout
        )
        self._unreported: list[int] = []
        # Also runs at the exit of a child of multiprocessing, which knows no atexit.
        Finalize(self, _at_the_end, (weakref.ref(self), self.async_calls), exitpriority=_EXIT_PRIORITY)

    @as_checkpoint_exception()
    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Start a request in the background. Call this on all ranks.

        Args:
            async_request: of this package, megatron-core or NVRx. Its arguments and finalize functions are those of
                this moment; what is changed later does not count.

        Returns:
            The request's number, which `maybe_finalize_async_calls` returns when it is done. From 0, never used twice.

        Raises:
            CheckpointStageError: with one rank, something of it cannot be sent to another process, and nothing is
                scheduled. With several, no rank waits here to learn how it went elsewhere: the request has its number
                on all ranks, and `maybe_finalize_async_calls` raises on all that it failed.
            RanksError: the store that all ranks share cannot be reached.
        """
        idx = self.call_idx + 1
        request = AsyncRequest.of(async_request).freeze()._replace(call_idx=idx)
        self._caller.schedule_async_call(request._replace(finalize_fns=[]))
        self.call_idx = idx
        # What the process was given is not needed here any more, and may be as large as the model.
        remainder = request._replace(async_fn=None, async_fn_args=(), async_fn_kwargs={}, preload_fn=None)
        self.async_calls.append(_ActiveAsyncRequest(idx, self._caller, remainder))
        return idx

    @as_checkpoint_exception()
    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalize the requests that are done, oldest first, up to the first that is not. Call this on all ranks.

        All ranks get the same answer in the n-th call, and finalize in it; they wait for each other only when there is
        something to finalize, and until all have done so.

        Args:
            blocking: wait for all of them, each at most until its deadline.
            no_dist: look at this rank alone, and leave out the others.

        Returns:
            Numbers of the requests finalized since the last return.

        Raises:
            CheckpointSaveError: a request failed, or a finalize function did. It is raised once, and that request is
                over; call again for the ones after it. With several ranks it is a RanksError, the same on all of them;
                where it failed, that error is the cause.
            CheckpointTimeoutError: rank 0 did not decide in time.
        """
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
        """How many requests were scheduled and not yet finalized."""
        return len(self.async_calls)

    @as_checkpoint_exception()
    def close(self, abort: bool = False) -> None:
        """Finalize all requests and end all processes. Call this on all ranks.

        Bounded, safe to call twice, and the queue can be used again.

        Args:
            abort: kill the processes now and forget their requests; no finalize function is called.

        Raises:
            CheckpointSaveError: a request failed; the first of them, after all else is done. Others are logged.
        """
        first: CheckpointError | None = None
        try:
            while self.async_calls and not abort:
                try:
                    self.maybe_finalize_async_calls(blocking=True)
                except CheckpointError as error:
                    if first is None:
                        first = error
                    else:
                        logger.error("%s", error)
        finally:
            self.async_calls.clear()
            self._caller.close(abort=abort)
        if first is not None:
            raise first

    def _finalize(self, active: _ActiveAsyncRequest, session: PeerSession | None) -> None:
        what = f"Finalizing request {active.idx}"

        def finalize() -> None:
            for fn in active.async_request.finalize_fns:
                try:
                    fn()
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # torch's CheckpointException is no Exception
                    text = f"{what} failed: {type(error).__name__}: {error}"
                    raise CheckpointSaveError(text, getattr(error, "errno", None)) from error

        if session is None:
            finalize()
        else:
            session.run_step(f"finalize/{active.idx}", finalize, what, self._write_timeout)


def _at_the_end(reference: weakref.ref[AsyncCallsQueue], calls: deque[_ActiveAsyncRequest]) -> None:
    """A queue was dropped, or the interpreter exits."""
    queue = reference()
    if queue is None:
        if calls:
            logger.error("a queue was dropped with %d requests that were not finalized; call its close()", len(calls))
    elif calls and queue._caller.peers.current is not None:
        # Finalizing is done by all ranks together, and the others may have ended already.
        text = "the interpreter exits with %d requests that were not finalized; call close() on all ranks first"
        logger.error(text, len(calls))
    else:
        try:
            queue.close()
        except CheckpointError:
            logger.exception("a request failed, and the script ended without asking for it")
