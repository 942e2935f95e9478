"""`Launch`: what a run knows of the script that builds it."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .._version import __version__
from ..config.hydra.hydra_job import MultirunJob, chosen_preset, job_overrides, launch_folder, multirun_job
from ..core.commit.run_record import StoredConfig, running_script
from .git_commit import commit_of
from .recorded_config import recorded_config


@dataclass(frozen=True)
class Launch:
    """The script around a run; without arguments, none.

    Attributes:
        preset: name of the preset that was chosen; None: unknown
        job: of a Hydra multirun
        record: returns the content of the run's record, which every checkpoint has; called on the leading rank
    """

    preset: str | None = None
    job: MultirunJob | None = None
    record: Callable[[], bytes] = StoredConfig().encode

    @classmethod
    def of_process(cls, preset: str | None, config: Any, overrides: Sequence[str]) -> Launch:
        """That of the script of this process.

        Args:
            preset: that was named; None: the one that its Hydra app has composed
            config: what it builds the run from
            overrides: applied to it
        """
        return cls(preset or chosen_preset(), multirun_job(), partial(_run_record, config, overrides))


def versions() -> dict[str, str]:
    """The versions of what runs here."""
    return {"ckpt_component": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def _run_record(config: Any, overrides: Sequence[str]) -> bytes:
    written, resolved = recorded_config(config, overrides)
    commit = commit_of(launch_folder())
    return StoredConfig(written, resolved, versions(), commit, running_script(), job_overrides()).encode()
