"""The checkpoint folder of the Hydra job that runs in this process, if any."""

from __future__ import annotations

import logging
import os
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from .compose import plain_dict
from .errors import HydraConfigError

logger = logging.getLogger(__name__)

#: Folder of checkpoints -> output folder of the multirun job that saves there. A process can run several jobs of a
#: multirun in turn, with Hydra's own launcher and with joblib's.
_USED: dict[str, str] = {}


def root_of_job(root: str, *, saves: bool) -> str:
    """The checkpoint folder of this process; in a multirun, a relative folder starts from the job's output folder.

    Args:
        root: The folder as configured.
        saves: Whether checkpoints are saved there, not only loaded.

    Returns:
        The folder; `root` unchanged outside a multirun or if it is absolute.

    Raises:
        CheckpointConfigError: Another job of the same multirun saves there.
    """
    output_dir = _multirun_job()
    if output_dir is None:
        return root
    if not os.path.isabs(root):
        folder = os.path.join(output_dir, root)
        logger.info(
            "checkpoints of this job go to %s, because in a multirun a relative checkpoint.dir starts from the job's "
            "output folder",
            folder,
        )
        return folder
    if not saves:
        return root
    other = _USED.setdefault(os.path.realpath(root), output_dir)
    if other != output_dir:
        raise HydraConfigError(
            f"checkpoint.dir={root} is also the folder of another job of this multirun ({other}), whose checkpoints "
            "this job would resume from; use a relative checkpoint.dir, or one that differs from job to job, such as "
            "'checkpoint.dir=/data/${hydra:job.num}'."
        )
    return root


def job_config() -> dict[str, Any] | None:
    """The composed config of this process's job with all of the app's keys, unresolved; None outside of a job."""
    if not HydraConfig.initialized():
        return None
    job: Any = HydraConfig.get()
    app = job._get_parent()  # Hydra offers no other way
    return plain_dict(app, resolve=False) if isinstance(app, DictConfig) else None


def launch_folder() -> str:
    """The folder in which this process, or the Hydra app whose job it runs, was started."""
    if HydraConfig.initialized():
        job: Any = HydraConfig.get()
        folder = OmegaConf.select(job, "runtime.cwd")
        if folder is not None:
            return str(folder)
    return os.getcwd()


def _multirun_job() -> str | None:
    """The output folder of the multirun job that runs in this process, or None."""
    if not HydraConfig.initialized():
        return None
    settings = HydraConfig.get()
    if settings.mode != RunMode.MULTIRUN or OmegaConf.is_missing(settings.runtime, "output_dir"):
        return None
    return str(settings.runtime.output_dir)
