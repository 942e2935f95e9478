"""The Hydra job that runs in this process, where there is one: where its checkpoints go."""

from __future__ import annotations

import logging
import os

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from .errors import HydraConfigError

logger = logging.getLogger(__name__)

#: Folder of checkpoints -> output folder of the multirun's job that saves there. Hydra's own launcher runs the jobs of
#: a multirun one after the other in one process, and joblib's processes run several.
_USED: dict[str, str] = {}


def root_of_job(root: str, *, saves: bool) -> str:
    """Where the checkpoints of this process go: in a job of a multirun a relative folder lies in the job's own.

    Args:
        root: as configured.
        saves: whether checkpoints are saved there, and not only loaded.

    Returns:
        The folder; `root` as it is outside of a multirun, and where it is absolute.

    Raises:
        CheckpointConfigError: another job of the same multirun saves there.
    """
    output_dir = _multirun_job()
    if output_dir is None:
        return root
    if not os.path.isabs(root):
        placed = os.path.join(output_dir, root)
        logger.info(
            "checkpoints of this job go to %s, because in a multirun a relative checkpoint.dir starts from the job's "
            "output folder",
            placed,
        )
        return placed
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


def _multirun_job() -> str | None:
    """The output folder of the multirun's job that runs in this process, if one does."""
    if not HydraConfig.initialized():
        return None
    settings = HydraConfig.get()
    if settings.mode != RunMode.MULTIRUN or OmegaConf.is_missing(settings.runtime, "output_dir"):
        return None
    return str(settings.runtime.output_dir)
