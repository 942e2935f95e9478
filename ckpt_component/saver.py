"""Takes saves from the training thread, and brings them to their end on a thread of its own, in order.

So the training thread never waits for storage, and the commit never needs the training thread.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from .attempt import AttemptRunner, Scheduled
from .callers.write_callers import WriteCaller
from .coordination import Coordinator
from .errors import CheckpointError, CheckpointSaveError, CheckpointTimeoutError
from .reports import SaveFuture, SaveReport, Timeouts
from .schedule import Schedule
from .stagers.base import Snapshot, Stager, Survey
from .storage.commit import Attempt
from .storage.fs import FsOps
from .storage.owner import Ownership
from .writers.base import Writer

logger = logging.getLogger(__name__)


class EarlierSaveFailed(Exception):
    """All ranks agreed to tell of an earlier save first: its number, and why it failed."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


class Saver:
    """Stages, writes and commits state dicts, one after the other.

    Args:
        stager: connected; owned by the saver from now on.
        caller: who runs the write job; connected, and owned too.
        writer: the format, for block size and name.
        ranks: how the ranks agree; owned too.
        fs: where effects go.
        timeouts: deadlines.

    Attributes:
        after_commit: called with the path after every commit, on the saving thread of the leading rank, before the
            save's future is done.
    """

    def __init__(
        self,
        stager: Stager,
        caller: WriteCaller,
        writer: Writer,
        ranks: Coordinator,
        fs: FsOps,
        timeouts: Timeouts,
    ) -> None:
        self.stager = stager
        self.caller = caller
        self.ranks = ranks
        self._timeouts = timeouts
        self._schedule = Schedule(ranks, timeouts.stage)
        self._runner = AttemptRunner(caller, writer, ranks, fs, timeouts)
        self.after_commit: Callable[[str], None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckpt-save")
        self._closing = threading.Lock()
        self._closed = False
        self._last: Future[SaveReport] | None = None
        # A script that forgets close(): the interpreter first lets the save thread finish, then runs this.
        self._at_exit = atexit.register(_close_if_alive, weakref.ref(self))

    def save(
        self, state_dict: Mapping[Any, Any], path: str, untold: Mapping[int, str] | None = None
    ) -> tuple[Future[None], SaveFuture]:
        """Take a snapshot now, and write and commit it in the background.

        Args:
            state_dict: what to save.
            path: absolute path of the checkpoint to be; taken paths are refused.
            untold: earlier saves that failed without anybody being told, by number.

        Returns:
            (staged, saved): done when training may change the tensors; with the `SaveReport` when it is committed.

        Raises:
            EarlierSaveFailed: a rank has an untold failure; nothing was begun.
            CheckpointError: it could not begin; with several ranks on all of them.
        """
        if self._closed:
            raise CheckpointError("This checkpointer is closed; build a new one to save again.")
        started = time.perf_counter()
        survey, error = self._survey(state_dict)
        changed = survey is not None and survey.changed
        agreed = self._schedule.agree(path, changed=changed, error=error, untold=untold or {})
        if agreed.untold is not None:
            raise EarlierSaveFailed(*agreed.untold)
        future = SaveFuture(path, agreed.number)
        future.set_running_or_notify_cancel()
        snapshot, error = self._take(survey, agreed.replan)
        staged: Future[None] = Future() if snapshot is None else snapshot.staged
        if snapshot is None:
            staged.set_exception(error)
        owner = "" if self._runner.ownership is None else self._runner.ownership.token
        scheduled = Scheduled(Attempt(path, agreed.token, owner), snapshot, error, started)
        self._last = future
        self._thread.submit(self._finish, scheduled, time.perf_counter() - started, future)
        return staged, future

    def own(self, ownership: Ownership) -> None:
        """Save only while this run owns the folder of checkpoints."""
        self._runner.ownership = ownership

    def close(self) -> None:
        """Let the saves that were started finish, then end the writer process and free the memory. Safe to call twice.

        Raises:
            CheckpointTimeoutError: a save hung; its deadline is timeouts.write.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self._at_exit)
        try:
            self.stager.close()
        finally:
            try:
                self._drain()
            finally:
                self._thread.shutdown(wait=False)
                self.caller.close()
                self.ranks.close()

    def _survey(self, state_dict: Mapping[Any, Any]) -> tuple[Survey | None, Exception | None]:
        """Other ranks wait for this one, so what is wrong here is told to them and not raised at once."""
        try:
            return self.stager.survey(state_dict), None
        except Exception as error:
            return None, error

    def _take(self, survey: Survey | None, replan: bool) -> tuple[Snapshot | None, Exception | None]:
        """With one rank a failure is raised; with several the others learn of it by this rank's vote."""
        try:
            if survey is None:
                raise CheckpointSaveError("The ranks agreed on a save that this one cannot take part in.")
            survey.changed = replan
            return self.stager.take(survey), None
        except Exception as error:
            if self.ranks.world_size == 1:
                raise
            return None, error

    def _drain(self) -> None:
        last = self._last
        if last is None or last.done():
            return
        limit = self._timeouts.stage + self._timeouts.write + self._timeouts.close
        try:
            Future.exception(last, limit)
        except TimeoutError as error:
            raise CheckpointTimeoutError(
                f"A save was still running {limit:g} s after close(); see timeouts.stage and timeouts.write."
            ) from error

    def _finish(self, scheduled: Scheduled, stall_s: float, future: SaveFuture) -> None:
        snapshot, path = scheduled.snapshot, scheduled.attempt.target
        try:
            report = replace(self._runner.run(scheduled), stall_s=stall_s)
        except BaseException as error:
            logger.error("%s was not saved: %s", path, error)
            if snapshot is not None:
                snapshot.release()
            future.set_exception(error)
        else:
            if snapshot is not None:
                snapshot.release()
            self._tell_commit(path)
            future.set_result(report)

    def _tell_commit(self, path: str) -> None:
        if self.after_commit is None or not self.ranks.leads:
            return
        try:
            self.after_commit(path)
        except Exception:
            # The checkpoint is committed, whatever its owner makes of it.
            logger.exception("%s is committed, but what follows a commit failed", path)


class BlockingWriter:
    """What a `SyncCheckpointer` writes with: save, and wait for the commit.

    Args:
        saver: closed with the writer.
    """

    def __init__(self, saver: Saver) -> None:
        self.saver = saver

    def write(self, state_dict: Mapping[Any, Any], path: str) -> SaveReport:
        """Return when the checkpoint is committed, or raise what went wrong."""
        started = time.perf_counter()
        _, future = self.saver.save(state_dict, path)
        report = future.result()  # its deadlines are those of the phases of a save
        return replace(report, stall_s=time.perf_counter() - started)

    def close(self) -> None:
        """Free memory and processes."""
        self.saver.close()


def _close_if_alive(saver: weakref.ref[Saver]) -> None:
    alive = saver()
    if alive is not None:
        alive.close()
