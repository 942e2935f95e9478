"""`AsyncCaller`: runs requests in the background and says when one is done on all ranks (seed 002)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

from .peers import Peers
from .request import AsyncRequest


class AsyncCaller(ABC):
    """Runs the `async_fn` of requests in another process.

    The calls of one caller are asked about in the order in which they were scheduled; the *current* call is the first
    that was not yet reported as done.
    """

    @cached_property
    def peers(self) -> Peers:
        """The callers of the other ranks. The callers of one queue share this."""
        return Peers()

    @abstractmethod
    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Run a request in the background. Call this on all ranks.

        Everything that the request needs is taken by value before this returns, and `preload_fn` has run. Waits for
        no other rank: with several, a request that cannot be scheduled on one of them is a call that failed there,
        which all ranks are told when they ask about it.

        Args:
            async_req: without `async_fn` there is nothing to run.

        Raises:
            CheckpointStageError: something of the request cannot be sent to another process; with one rank.
            StartMethodError: fork where CUDA is in use; with one rank.
            RanksError: the store that all ranks share is gone.
        """

    @abstractmethod
    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Whether the current call is done on all ranks. Call this on all ranks, in the same way.

        All ranks get the same answer to the n-th question, without a collective: it is the one that rank 0 got.

        Args:
            blocking: wait until it is done, at most as long as its deadline allows.
            no_dist: look at this rank alone.

        Returns:
            True when it is done, or nothing is scheduled.

        Raises:
            CheckpointSaveError: the call failed; raised once. The call is then over, and the next one is the current
                one. With several ranks it is a RanksError, the same on all of them as soon as one has failed; where
                the call failed, that error is the cause.
            CheckpointTimeoutError: the call, or rank 0's decision, did not come before the deadline.
        """

    def sync_all_async_calls(self, is_alive: int) -> bool:
        """Whether no rank has a call at work; waits for all ranks. Call this on all ranks.

        Args:
            is_alive: nonzero when this rank's current call is not done.
        """
        session = self.peers.session()
        alive = int(bool(is_alive))
        return (alive if session is None else session.total(alive)) == 0

    @abstractmethod
    def close(self, abort: bool = False) -> None:
        """End the processes. Bounded; safe to call twice; the caller can be used again.

        Args:
            abort: kill them now and forget their calls. Otherwise they finish first, each within its deadline.
        """
