"""`SimulatedPool`: in the place of threads for independent tasks, does each when it is submitted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..core.outside import Future


class SimulatedPool:
    """See the top of this file. The end of a process, and a power cut, are those of the thread that submits."""

    def __enter__(self) -> SimulatedPool:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def submit(self, task: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        """Do a task; returns a future that has ended."""
        future = Future[Any]()
        try:
            future.set_result(task(*arguments))
        except SystemExit:
            raise
        except BaseException as error:
            future.set_exception(error)
        return future

    def map(self, task: Callable[..., Any], *arguments: Iterable[Any]) -> Iterator[Any]:
        """Do a task with each of these; gives what each returned."""
        futures = [self.submit(task, *each) for each in zip(*arguments, strict=False)]
        return iter([future.result(0) for future in futures])

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """There are no threads."""
