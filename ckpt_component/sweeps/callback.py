"""The report at the end of a multirun, as a Hydra callback: `hydra/callbacks=checkpoint_report`.

Hydra 1.3 does not call `on_multirun_end` when a job failed, and any Hydra turns what it raises into a warning. So
`ckpt-train` and `ckpt-bench` run inside `reported()`, which gets the folder from the callback and reports in any case;
in another app the callback reports itself.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from ..config.errors import CheckpointConfigError

#: The sweeps that began inside of the innermost `reported()`; None outside of one.
_BEGUN: ContextVar[list[Path] | None] = ContextVar("sweeps_begun", default=None)


class SweepReport(Callback):
    """Reports a sweep when it ends. Of several ranks, rank 0 does."""

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
    warnings.filterwarnings("ignore", message=r".*_target_='ckpt_component\.sweeps\.callback\.")
    begun = list[Path]()
    token = _BEGUN.set(begun)
    try:
        yield
    finally:
        _BEGUN.reset(token)
        for folder in begun:
            _report(folder)


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
