"""The checkpoint folder of the Hydra job that runs in this process, if any.

Jobs of a multirun run in one process, one after the other, or in several processes at a time (joblib, submitit, Slurm).
So which job saves where is written into the multirun's output folder, which all of them see.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import dataclass
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ...core.storage.folder_identity import folder_id, same_folder
from ...core.storage.locate import absolute, file_storage, is_url
from ...core.storage.new_names import new_token
from ...core.storage.storage import Storage
from .compose import plain_dict
from .hydra_errors import HydraConfigError

logger = logging.getLogger(__name__)

#: Folder in the multirun's output folder: a file per checkpoint folder, which says which job saves there.
_CLAIMS = ".checkpoint_dirs"
_CLAIM_BYTES = 1 << 20


def chosen_preset() -> str | None:
    """The choice of the group `checkpoint` in the Hydra app that runs in this process, if any."""
    return HydraConfig.get().runtime.choices.get("checkpoint") if HydraConfig.initialized() else None


@dataclass(frozen=True)
class MultirunJob:
    """A job of a Hydra multirun.

    Attributes:
        output_dir: its output folder
        sweep_dir: the output folder of the whole multirun
        overrides: its overrides; a job of a later multirun with the same overrides is the same job
    """

    output_dir: str
    sweep_dir: str
    overrides: tuple[str, ...]

    def root(self, configured: str) -> str:
        """The checkpoint folder; a relative one starts from the job's output folder."""
        if os.path.isabs(configured) or is_url(configured):
            return configured
        folder = os.path.join(self.output_dir, configured)
        logger.info(
            "checkpoints of this job go to %s, because in a multirun a relative checkpoint.dir starts from the job's "
            "output folder",
            folder,
        )
        return folder

    def claim(self, fs: Storage, root: str) -> str:
        """Record that this job saves in `root`, for the other jobs; returns `root`.

        Raises:
            CheckpointConfigError: another job of the multirun saves there
        """
        fs = file_storage() if is_url(root) else fs
        path = os.path.join(self.sweep_dir, _CLAIMS)
        mine: dict[str, Any] = {"dir": absolute(root), "job": self.output_dir, "overrides": list(self.overrides)}
        try:
            if not is_url(root):
                fs.make_folders(absolute(root))  # a folder that is there is the same one in all spellings
            name = hashlib.sha256(os.fsencode(folder_id(root))).hexdigest()[:16]
            path = os.path.join(self.sweep_dir, _CLAIMS, f"{name}.json")
            owner = _put_or_read(fs, path, mine)
            if not same_folder(str(owner["dir"]), root):  # of a folder that was deleted, whose inode this one has
                fs.unlink(path)
                owner = _put_or_read(fs, path, mine)
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be used, so jobs that save in one folder go unnoticed: %s", path, error)
            return root
        if owner["job"] != self.output_dir and owner["overrides"] != mine["overrides"]:
            raise HydraConfigError(
                f"checkpoint.dir={root} is also the folder of another job of this multirun ({owner['job']}, says "
                f"{path}), whose checkpoints this job would resume from; use a relative checkpoint.dir, or one that "
                "differs from job to job, such as 'checkpoint.dir=/data/${hydra:job.num}'."
            )
        return root

    def others(self, root: str) -> list[str]:
        """The checkpoint folders of the other jobs of the multirun that have claimed theirs; `root` is this job's."""
        fs, folder, others = file_storage(), os.path.join(self.sweep_dir, _CLAIMS), list[str]()
        try:
            for name in sorted(fs.names(folder)):
                claim = json.loads(fs.read(os.path.join(folder, name), _CLAIM_BYTES)) if name.endswith(".json") else {}
                if not same_folder(str(claim.get("dir", root)), root):
                    others.append(claim["dir"])
        except (OSError, ValueError, AttributeError) as error:
            logger.info("the folders of the other jobs are unknown: %s", error)
        return others


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


def multirun_job() -> MultirunJob | None:
    """The multirun job that runs in this process, or None."""
    if not HydraConfig.initialized():
        return None
    settings = HydraConfig.get()
    if settings.mode != RunMode.MULTIRUN or OmegaConf.is_missing(settings.runtime, "output_dir"):
        return None
    sweep_dir = os.path.join(str(settings.runtime.cwd), str(settings.sweep.dir))
    return MultirunJob(str(settings.runtime.output_dir), sweep_dir, tuple(map(str, settings.overrides.task)))


def _put_or_read(fs: Storage, path: str, mine: dict[str, Any]) -> dict[str, Any]:
    """Create the file in one step, or read the one that another job created."""
    data = json.dumps(mine, indent=2).encode()
    fs.make_folders(os.path.dirname(path))
    draft = f"{path}.{new_token()}"
    fs.write_new(draft, data)
    try:
        fs.put_new(path, data, draft)
        return mine
    except FileExistsError:
        owner = json.loads(fs.read(path, _CLAIM_BYTES))
        if not isinstance(owner, dict) or not owner.keys() >= mine.keys():
            raise ValueError("it was not written by ckpt_component") from None
        return owner
    finally:
        fs.unlink(draft)
