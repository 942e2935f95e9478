"""Hydra callback that reports the saves of a run: `hydra/callbacks=checkpoint_report`.

In the process of a job it writes `result.json`, unless the app writes its own. A run is reported when it ends, and a
multirun when its process exits, because Hydra 1.3 does not call `on_multirun_end` if a job failed.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from ...config.errors import CheckpointConfigError
from ...managing import recording
from .figures import figures_of
from .result import RUNNING, read_result, write_job_result


class SweepReport(Callback):
    """Writes the result of a job, and reports a run or sweep when it ends. With several ranks, only on rank 0."""

    _records = False

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra in the process of a job, before it begins."""
        if _leads():
            read_result(config.hydra.runtime.output_dir)  # if this raises, Hydra warns and the file is not changed
            self._records = True
            recording.start()
            write_job_result(RUNNING)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """Called by Hydra in the process of a job after it returned or raised an exception."""
        if not self._records:
            return
        self._records, managers = False, recording.stop()
        so_far = read_result(config.hydra.runtime.output_dir)
        if so_far is None or so_far["status"] != RUNNING:
            return  # the app has written its own result
        status, reason = "completed", None
        if job_return.status == JobStatus.FAILED:
            error = job_return._return_value  # the property would raise it
            status, reason = "failed", str(error) or type(error).__name__
        elif idle := [manager.idle for manager in managers if manager.idle is not None]:
            reason = f"restored step {idle[0]} and trained nothing"
        figures = figures_of([report for manager in managers for report in manager.reports])
        write_job_result(status, reason=reason, figures=figures)

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Called by Hydra after a single run. Of one that failed, the error is enough.

        A job that measures several things has shown them by itself.
        """
        if _leads() and kwargs["job_return"].status == JobStatus.COMPLETED:
            from .jobs import read_jobs
            from .report import table

            rows = read_jobs(Path(os.path.relpath(config.hydra.runtime.output_dir)))
            if not any(row.name for row in rows):
                print(f"\n{table(rows)}")

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra before the first job."""
        if _leads():
            # Relative to the current folder, as in Hydra itself; no job has changed it yet.
            atexit.register(report_sweep, Path(os.path.abspath(config.hydra.sweep.dir)))


def report_sweep(folder: Path) -> None:
    """Print the report of a sweep, or why there is none."""
    from .report import report

    folder = Path(os.path.relpath(folder))
    print(f"\nsweep {folder}\n")
    try:
        report(folder)
    except CheckpointConfigError as error:
        print(f"no report: {error}", file=sys.stderr)


def _leads() -> bool:
    return os.environ.get("RANK", "0") == "0"
