"""Hydra callback that reports the saves of a run, and continues a sweep: `hydra/callbacks=checkpoint_report`.

In the process of a job it writes `result.json`, unless the app writes its own. A run is reported when it ends, and a
multirun when its process exits, because Hydra 1.3 does not call `on_multirun_end` if a job failed.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from ...config.hydra.hydra_errors import CheckpointConfigError
from ...core.processes.running import OwnerProcess
from ...managing import recording
from .result import (
    RUNNING,
    NoJobsError,
    Span,
    add_returned,
    add_span,
    disk_of,
    read_jobs,
    read_result,
    write_job_result,
)
from .sweep_figures import earlier_saves, figures_of

if TYPE_CHECKING:
    from ...managing.manager import CheckpointManager
    from .sweep_launcher import EarlierJobs


logger = logging.getLogger(__name__)


class SweepReport(Callback):
    """Writes the result of a job, and reports a run or sweep when it ends. With several ranks, only on rank 0.

    A multirun in a folder of an earlier one continues it, on all ranks; see `sweep_launcher`.
    """

    _began: float | None = None
    #: Of a multirun.
    _earlier: EarlierJobs | None = None

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra in the process of a job, before it begins."""
        if _leads() and not self._is_of_earlier_job():
            read_result(config.hydra.runtime.output_dir)  # if this raises, Hydra warns and the file is not changed
            self._began = time.time()
            recording.start()
            write_job_result(RUNNING)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """Called by Hydra in the process of a job after it returned or raised an exception."""
        if self._began is None:
            return
        began, self._began, managers = self._began, None, recording.stop()
        folder = config.hydra.runtime.output_dir
        so_far = read_result(folder)
        if so_far is not None and so_far["status"] == RUNNING:  # else the app has written its own result
            self._write_result(job_return, managers)
        roots = dict.fromkeys(os.path.dirname(manager.path_of(0)) for manager in managers if manager.reports)
        add_span(folder, Span(began, time.time(), tuple(dict.fromkeys(map(disk_of, roots)))))
        if job_return.status == JobStatus.COMPLETED:
            add_returned(folder, job_return.return_value)

    def _is_of_earlier_job(self) -> bool:
        """Whether the result in the folder of this job is of one that ended before, or of another one."""
        earlier = self._earlier
        return earlier is not None and (earlier.has_ended() or earlier.overrides_of_another() is not None)

    def _write_result(self, job_return: JobReturn, managers: Sequence[CheckpointManager]) -> None:
        status, reason = "completed", None
        if job_return.status == JobStatus.FAILED:
            error = job_return._return_value  # the property would raise it
            status, reason = "failed", str(error) or type(error).__name__
        elif idle := [manager.idle for manager in managers if manager.idle is not None]:
            reason = f"restored step {idle[0]} and trained nothing"
        earlier = [save for manager in managers for save in earlier_saves(manager)]
        figures = figures_of([report for manager in managers for report in manager.reports], earlier=earlier)
        write_job_result(status, reason=reason, figures=figures)

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Called by Hydra after a single run. Of one that failed, the error is enough.

        A job that measures several things has shown them by itself.
        """
        if _leads() and kwargs["job_return"].status == JobStatus.COMPLETED:
            from .sweep_report import costs

            rows = read_jobs(Path(os.path.relpath(config.hydra.runtime.output_dir)))
            if not any(row.name for row in rows):
                print("", *map(costs, rows), sep="\n")

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra before the first job."""
        from .sweep_launcher import continue_sweep

        self._earlier = continue_sweep(config, leads=_leads())
        if _leads():
            where = str(config.hydra.sweep.dir)
            typed = any(word.startswith("hydra.sweep.dir=") for word in config.hydra.overrides.hydra)
            how = "the same command" if typed else f"the same command with hydra.sweep.dir={where}"
            logger.info("If this sweep is killed, %s continues it.", how)
            # Relative to the current folder, as in Hydra itself; no job has changed it yet.
            atexit.register(_report_at_exit, OwnerProcess("sweep"), Path(os.path.abspath(config.hydra.sweep.dir)))


def _report_at_exit(owner: OwnerProcess, folder: Path) -> None:
    if owner.is_here:  # a child that a job has forked runs this too
        report_sweep(folder)


def report_sweep(folder: Path) -> None:
    """Print the report of a sweep, or why there is none."""
    from .sweep_report import report

    folder = Path(os.path.relpath(folder))
    print(f"\nsweep {folder}\n")
    try:
        report(folder)
    except NoJobsError:
        print("no report: no job began", file=sys.stderr)
    except CheckpointConfigError as error:
        print(f"no report: {error}", file=sys.stderr)


def _leads() -> bool:
    return os.environ.get("RANK", "0") == "0"
