"""The saves that were started and are not yet accounted for: their reports, and whose failure has yet to be told."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import replace

from ..errors import CheckpointTimeoutError
from .report import SaveFuture, SaveReport


class PendingSaves:
    """Futures of saves with their steps, in order.

    Args:
        reports: where the reports of ended saves go.
    """

    def __init__(self, reports: list[SaveReport]) -> None:
        self._reports = reports
        self._saves: list[tuple[int, SaveFuture]] = []

    def add(self, step: int, future: SaveFuture) -> None:
        """Account for one more save."""
        self._saves.append((step, future))

    def wait(self, limit: float) -> None:
        """Return when all of them are over, however they ended.

        Args:
            limit: seconds for each.

        Raises:
            CheckpointTimeoutError: one of them hangs.
        """
        deadline = time.monotonic() + limit * max(len(self._saves), 1)
        for _, future in self._saves:
            try:
                Future.exception(future, timeout=max(deadline - time.monotonic(), 0))
            except TimeoutError as error:
                raise CheckpointTimeoutError(f"A save was still running after {limit:g} s (timeouts.write).") from error

    def take_failures(self) -> list[BaseException]:
        """The errors that nobody has seen, of saves that are over; they count as told."""
        untold = [future for _, future in self._saves if not future.delivered]
        return [error for error in (future.exception() for future in untold) if error is not None]

    def collect(self, only_told: bool = False) -> tuple[list[int], BaseException | None]:
        """Turn ended saves into reports.

        Args:
            only_told: leave failures that nobody has seen for later.

        Returns:
            The steps that are not saved after all, and the first error that nobody has seen, which counts as told now.
        """
        failed_steps: list[int] = []
        failure: BaseException | None = None
        running: list[tuple[int, SaveFuture]] = []
        for step, future in self._saves:
            seen = future.delivered
            failed = future.done() and Future.exception(future, timeout=0) is not None
            if not future.done() or (failed and not seen and (failure is not None or only_told)):
                running.append((step, future))
                continue
            self._reports.append(replace(future.report(), step=step))
            if failed:
                failed_steps.append(step)
                error = future.exception()
                if not seen:
                    failure = error
        self._saves = running
        return failed_steps, failure
