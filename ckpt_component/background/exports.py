"""Exports of a run's checkpoints, in the background: one process of low priority at a time."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from ..config.schema import Export
from ..core.commit.names import step_in_name
from ..core.outside import OUTSIDE, Outside
from ..core.storage.space import amount
from ..errors import CheckpointError
from ..events import SaveReport
from ..exporting.export import ExportOptions
from .jobs import Follower, RequestQueue

logger = logging.getLogger(__name__)

_PROCESS = "ckpt_component.background.export_process"
_SUFFIXES = {"hf": "", "safetensors": ".safetensors", "torch": ".pt"}


class BackgroundExports(Follower):
    """Exports checkpoints that were committed. A failure is a warning, and never stops the run.

    While an export runs, only the newest request waits.

    Args:
        settings: when to export, and how long that may take
        options: how
        folder: absolute path of the folder of the exports, which are named as their checkpoints; empty: `exports`
            beside them
        note: records an event, from the thread of the exports
        outside: of the run
    """

    def __init__(
        self,
        settings: Export,
        options: ExportOptions,
        folder: str,
        note: Callable[[dict[str, Any]], None],
        outside: Outside = OUTSIDE,
    ) -> None:
        self._settings, self._options, self._folder = settings, options, folder
        self._note, self._outside = note, outside
        setting = "checkpoint.export.timeout"
        self._requests = RequestQueue(_PROCESS, "ckpt-export", self._export, settings.timeout, setting, outside)
        self._newest: SaveReport | None = None
        self._requested: SaveReport | None = None

    def on_commit(self, report: SaveReport) -> None:
        """Export a checkpoint, if it is due. Does not wait."""
        self._newest = report
        every = self._settings.every_steps
        if every is not None and report.step is not None and report.step % every == 0:
            self._request(report)

    def in_use(self) -> set[str]:
        """The checkpoints that are or will be exported, which must not be deleted."""
        return self._requests.in_use()

    def end(self, *, finish: bool) -> None:
        """Export the newest checkpoint and wait for it, or end the export that runs. Bounded by its deadline.

        Args:
            finish: the run has come to its end
        """
        if finish and self._newest is not None and self._newest is not self._requested:
            self._request(self._newest)
        self._requests.end(finish=finish)

    def _request(self, report: SaveReport) -> None:
        self._requested = report
        for each in self._requests.add(report):
            logger.warning("%s is not exported, because an earlier export is still running", each.path)

    def _export(self, report: SaveReport) -> None:
        """On the thread: export a checkpoint, and record what became of it."""
        path, started = report.path, self._outside.date()
        root, name = os.path.split(path)
        target = os.path.join(self._folder or os.path.join(root, "exports"), name + _SUFFIXES[self._options.format])
        outcome: dict[str, Any]
        try:
            answer = self._requests.run({"source": path, "target": target, "options": vars(self._options)})
            size, seconds = amount(answer["nbytes"]), answer["seconds"]
            logger.info("%s exported: %s in %.1f s, %s", name, size, seconds, target)
            outcome = {"outcome": "exported", "bytes": answer["nbytes"]}
        except Exception as error:  # whatever it is, later checkpoints are exported
            expected = isinstance(error, (CheckpointError, OSError, ValueError))
            text = "%s was not exported, and the run continues: %s"
            logger.warning(text, path, error, exc_info=not expected)
            outcome = {"outcome": "failed", "error": str(error)}
        step = step_in_name(name)
        event = {"event": "export", "time": round(started, 6), "step": step, "path": path, "target": target}
        self._note({**event, **outcome, "seconds": round(self._outside.date() - started, 6)})
