"""Exports of a run's checkpoints, in the background: one process of low priority at a time."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.commit.names import step_in_name
from ..core.processes.exit_text import describe_exit
from ..core.processes.start import Child, start_in_background
from ..core.storage.space import amount
from ..errors import CheckpointError, CheckpointSaveError, CheckpointTimeoutError
from ..events import SaveReport
from ..exporting.export import ExportOptions

logger = logging.getLogger(__name__)

_PROCESS = "ckpt_component.background.export_process"

#: For an export that is given up to delete its files.
_LEAVE_SECONDS = 5.0
_SUFFIXES = {"hf": "", "safetensors": ".safetensors", "torch": ".pt"}


@dataclass(frozen=True)
class ExportPolicy:
    """What to export, and where.

    Attributes:
        options: how
        folder: absolute path of the folder of the exports, which are named as their checkpoints; empty: `exports`
            beside them
        every_steps: export each checkpoint whose step is a multiple; None: only the last
        timeout: seconds for one export
    """

    options: ExportOptions
    folder: str
    every_steps: int | None
    timeout: float

    def target_of(self, checkpoint: str) -> str:
        """Where the export of a checkpoint is."""
        root, name = os.path.split(checkpoint)
        return os.path.join(self.folder or os.path.join(root, "exports"), name + _SUFFIXES[self.options.format])


class BackgroundExports:
    """Exports checkpoints that were committed. A failure is a warning, and never stops the run.

    While an export runs, only the newest request waits.

    Args:
        policy: what to export
        note: records an event, from the thread of the exports
    """

    def __init__(self, policy: ExportPolicy, note: Callable[[dict[str, Any]], None]) -> None:
        self._policy = policy
        self._note = note
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process: Child | None = None
        #: What is exported now, and what waits.
        self._pending: list[str] = []
        self._newest: str | None = None
        self._requested: str | None = None
        self._given_up = threading.Event()

    def on_commit(self, report: SaveReport) -> None:
        """Export a checkpoint, if it is due. Does not wait."""
        self._newest = report.path
        every = self._policy.every_steps
        if every is not None and report.step is not None and report.step % every == 0:
            self._request(report.path)

    def in_use(self) -> set[str]:
        """The checkpoints that are or will be exported, which must not be deleted."""
        with self._lock:
            return {*self._pending}

    def end(self, *, finish: bool) -> None:
        """Export the newest checkpoint and wait for it, or end the export that runs. Bounded by its deadline.

        Args:
            finish: the run has come to its end
        """
        if finish and self._newest is not None and self._newest != self._requested:
            self._request(self._newest)
        with self._lock:
            thread = self._thread
            if not finish:
                self._given_up.set()
                del self._pending[1:]
        if thread is None:
            return
        if finish:
            logger.info("waiting until %s is exported", self._requested)
        elif (process := self._process) is not None:
            process.end(_LEAVE_SECONDS)
        # One that runs and one that waits; each ends by itself at its deadline.
        thread.join(2 * (self._policy.timeout + _LEAVE_SECONDS))

    def _request(self, path: str) -> None:
        with self._lock:
            self._requested = path
            skipped, self._pending[1:] = self._pending[1:], [path]
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ckpt-export", daemon=True)
                self._thread.start()
        for each in skipped:
            logger.warning("%s is not exported, because an earlier export is still running", each)

    def _run(self) -> None:
        path: str | None = self._pending[0]
        while path is not None:
            started, step = time.time(), step_in_name(os.path.basename(path))
            event = {"event": "export", "time": round(started, 6), "step": step, "path": path}
            outcome: dict[str, Any]
            try:
                outcome = {"outcome": "exported", "bytes": self._export(path)["nbytes"]}
            except Exception as error:  # whatever it is, later checkpoints are exported
                expected = isinstance(error, (CheckpointError, OSError, ValueError))
                text = "%s was not exported, and the run continues: %s"
                logger.warning(text, path, error, exc_info=not expected)
                outcome = {"outcome": "failed", "error": str(error)}
            seconds = round(time.time() - started, 6)
            self._note({**event, "target": self._policy.target_of(path), **outcome, "seconds": seconds})
            with self._lock:
                del self._pending[0]
                path = next(iter(self._pending), None)
                if path is None:
                    self._thread = None

    def _export(self, path: str) -> dict[str, Any]:
        """Run the process, and return its answer.

        Raises:
            CheckpointError: the export failed
        """
        policy, target = self._policy, self._policy.target_of(path)
        job = {"source": path, "target": target, "options": vars(policy.options)}
        process = self._process = start_in_background(_PROCESS, job)
        try:
            if self._given_up.is_set():  # before there was a process to tell
                process.hang_up()
            frame = process.receive(time.monotonic() + policy.timeout)
        except TimeoutError as error:
            raise CheckpointTimeoutError(
                f"it took longer than {policy.timeout:g} s (checkpoint.export.timeout)"
            ) from error
        finally:
            code = process.end(_LEAVE_SECONDS)
        if frame is None and self._given_up.is_set():
            raise CheckpointSaveError("the run has ended before its end")
        answer: dict[str, Any] = {"error": f"its process {describe_exit(code)}"} if frame is None else frame[0]
        if "error" in answer:
            raise CheckpointSaveError(answer["error"])
        size = amount(answer["nbytes"])
        logger.info("%s exported: %s in %.1f s, %s", os.path.basename(path), size, answer["seconds"], target)
        return answer
