"""What a run's saves came to, as a Hydra callback: `hydra/callbacks=checkpoint_report`.

In the process of a job it writes `result.json`, unless the app writes a better one; a multirun it reports at its end.

Hydra 1.3 does not call `on_multirun_end` when a job failed, and any Hydra turns what it raises into a warning. So
`ckpt-train` and `ckpt-bench` run inside `reported()`, which gets the folder from the callback and reports in any case;
in another app the callback reports itself.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from ...config.errors import CheckpointConfigError
from ...managing import recording
from .figures import figures_of
from .result import RESULT, RUNNING, read_result, write_job_result

if TYPE_CHECKING:
    from ...managing.manager import CheckpointManager

#: The sweeps that began inside of the innermost `reported()`; None outside of one.
_BEGUN: ContextVar[list[Path] | None] = ContextVar("sweeps_begun", default=None)


class SweepReport(Callback):
    """Writes the result of a job, and reports a run or a sweep when it ends. Of several ranks, rank 0 does."""

    _records = False

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra in the process of a job, before it begins."""
        if not _leads():
            return
        folder = str(config.hydra.runtime.output_dir)
        try:
            read_result(folder)
        except ValueError as error:
            warnings.warn(f"{folder}/{RESULT} is left as it is ({error}), so this job has no figures", stacklevel=1)
            return
        self._records = True
        recording.start()
        write_job_result(RUNNING)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """Called by Hydra in the process of a job when it returned or raised an exception."""
        if not self._records:
            return
        self._records, managers = False, recording.stop()
        so_far = read_result(str(config.hydra.runtime.output_dir))
        if so_far is None or so_far["status"] != RUNNING:
            return  # the app has written its own result
        if job_return.status == JobStatus.FAILED:
            error = job_return._return_value  # the property would raise it
            write_job_result("failed", reason=str(error) or type(error).__name__, figures=_figures(managers))
            return
        idle = [manager.idle for manager in managers if manager.idle is not None]
        reason = f"restored step {idle[0]} and trained nothing" if idle else None
        write_job_result("completed", reason=reason, figures=_figures(managers))

    def on_run_end(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra after a single run."""
        if _BEGUN.get() is None and _leads():
            from .jobs import read_jobs
            from .report import table

            print(f"\n{table(read_jobs(Path(os.path.relpath(config.hydra.runtime.output_dir))))}")

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra before the first job."""
        begun = _BEGUN.get()
        if begun is not None and _leads():
            begun.append(_folder(config))

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra after the last job; by 1.3 only when none failed."""
        if _BEGUN.get() is None and _leads():
            _report(_folder(config))


@contextmanager
def reported() -> Iterator[None]:
    """Report the sweep that runs inside the `with`, however it ends; nothing when there was none."""
    # Hydra 1.4 warns of every target in a config that is on no list. A list of ours would shut out a user's callbacks.
    warnings.filterwarnings("ignore", message=r".*_target_='ckpt_component\.apps\.sweeps\.callback\.")
    begun = list[Path]()
    token = _BEGUN.set(begun)
    try:
        yield
    finally:
        _BEGUN.reset(token)
        for folder in begun:
            _report(folder)


def _figures(managers: Sequence[CheckpointManager]) -> dict[str, Any]:
    return figures_of([report for manager in managers for report in manager.reports])


def _report(folder: Path) -> None:
    from .report import report

    print(f"\nsweep {folder}\n")
    try:
        report(folder)
    except CheckpointConfigError as error:
        # The sweep's own error, where it had one, goes on.
        print(f"no report: {error}", file=sys.stderr)


def _folder(config: DictConfig) -> Path:
    # As Hydra itself takes it: from the current folder, which no job has changed yet.
    return Path(os.path.relpath(os.path.abspath(str(config.hydra.sweep.dir))))


def _leads() -> bool:
    return os.environ.get("RANK", "0") == "0"
