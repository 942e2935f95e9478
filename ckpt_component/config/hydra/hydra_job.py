"""The checkpoint folder of the Hydra job that runs in this process, if any.

Jobs of a multirun run in one process, one after the other, or in several processes at a time (joblib, submitit, Slurm).
So which job saves where is written into the multirun's output folder, which all of them see.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ...core.commit.names import NAMINGS
from ...core.commit.run_record import StoredConfig, stored_config
from ...core.storage.locate import absolute, file_storage, folder_id, is_url, same_folder
from ...core.storage.new_names import new_token
from ...core.storage.storage import Storage
from ...errors import CheckpointError
from .. import config_dir
from ..secrets import HIDDEN, environment_secrets, shown
from .compose import plain_dict
from .hints import command_line
from .hydra_errors import HydraConfigError

logger = logging.getLogger(__name__)

#: Folder in the multirun's output folder: a file per checkpoint folder, which says which job saves there.
_CLAIMS = ".checkpoint_dirs"
_CLAIM_BYTES = 1 << 20


def is_about_saving(override: str) -> bool:
    """Whether an override of a job sets how it saves, or a key of Hydra's own, and not what it trains."""
    return override.lstrip("+~").startswith(("checkpoint.", "checkpoint/", "checkpoint=", "hydra.", "hydra/", "hydra="))


def train_alike(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether jobs with these overrides train the same: they differ at most in how they save."""
    return _of_training(one) == _of_training(other)


def _of_training(overrides: Sequence[str]) -> list[str]:
    return sorted(word for word in overrides if not is_about_saving(word))


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

        Args:
            fs: the storage of `root`
            root: the checkpoint folder

        Raises:
            CheckpointConfigError: another job of the multirun saves there, or the checkpoints there are of a job that
                trained something else
        """
        storage = file_storage() if is_url(root) else fs
        path = os.path.join(self.sweep_dir, _CLAIMS)
        mine: dict[str, Any] = {"dir": absolute(root), "job": self.output_dir, "overrides": list(self.overrides)}
        try:
            if not is_url(root):
                fs.make_folders(absolute(root))  # a folder that is there is the same one in all spellings
            name = hashlib.sha256(os.fsencode(folder_id(root))).hexdigest()[:16]
            path = os.path.join(self.sweep_dir, _CLAIMS, f"{name}.json")
            owner = _put_or_read(storage, path, mine)
            if not same_folder(str(owner["dir"]), root):  # of a folder that was deleted, whose inode this one has
                storage.unlink(path)
                owner = _put_or_read(storage, path, mine)
            is_same = owner["job"] == self.output_dir
            if is_same and not train_alike(owner["overrides"], self.overrides) and not fs.names(absolute(root)):
                storage.write_over(path, json.dumps(mine, indent=2).encode())  # that job ended before it saved anything
                owner = mine
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be used, so jobs that save in one folder go unnoticed: %s", path, error)
            return root
        if not is_same and sorted(owner["overrides"]) != sorted(self.overrides):
            raise HydraConfigError(
                f"checkpoint.dir={root} is also the folder of another job of this multirun ({owner['job']}, says "
                f"{path}), whose checkpoints this job would resume from; use a relative checkpoint.dir, or one that "
                "differs from job to job, such as 'checkpoint.dir=/data/${hydra:sweep.subdir}'."
            )
        self._refuse(root, owner["overrides"], self.overrides)
        saved = _newest_record(fs, absolute(root))
        if saved is not None and saved[1].overrides is not None:
            self._refuse(saved[0], saved[1].overrides, public_overrides(self.overrides))
        return root

    def _refuse(self, path: str, theirs: Sequence[str], mine: Sequence[str]) -> None:
        """Refuse checkpoints of a job whose overrides, other than those about saving, are not those of this job."""
        if train_alike(theirs, mine):
            return
        others = " ".join(word for word in _of_training(theirs) if word not in mine)
        own = " ".join(word for word in _of_training(mine) if word not in theirs)
        which = f"with {others}, and this one has {own}" if others and own else f"with {others}, and this one has not"
        raise HydraConfigError(
            f"{path} is of a job {which if others else f'without {own}, and this one has it'}; a job does not resume "
            "from the checkpoints of another one. Use another hydra.sweep.dir or checkpoint.dir, or "
            "hydra/callbacks=checkpoint_report, with which each job of a sweep finds its own folder."
        )

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


def job_overrides() -> list[str] | None:
    """The overrides of the Hydra job that runs in this process, without secrets; None outside of a job."""
    if not HydraConfig.initialized() or OmegaConf.select(HydraConfig.get(), "overrides.task") is None:  # type: ignore[arg-type]
        return None
    return public_overrides(task_overrides(HydraConfig.get()))


def task_overrides(settings: Any) -> list[str]:
    """The overrides of a job, or those of a whole multirun, as they were typed.

    Args:
        settings: Hydra's own node of the config
    """
    # An interpolation stays as it is: it may have another value in another job, or none that can be resolved.
    words = OmegaConf.to_container(settings.overrides.task, resolve=False)
    return [str(word) for word in words] if isinstance(words, list) else []


def public_overrides(overrides: Sequence[str]) -> list[str]:
    """Overrides as they may be stored: without the values that are secrets."""
    secrets = environment_secrets()
    return [_public(word, secrets) for word in overrides]


def _public(override: str, secrets: re.Pattern[str] | None) -> str:
    key, equals, value = override.partition("=")
    text = f"{key}{equals}{shown(key.lstrip('+~').replace('/', '.'), value)}"
    return text if secrets is None else secrets.sub(HIDDEN, text)


def is_multirun(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is the output folder of a multirun."""
    return any(os.path.exists(os.path.join(folder, name)) for name in (_CLAIMS, "multirun.yaml"))


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
    return MultirunJob(str(settings.runtime.output_dir), sweep_dir, tuple(task_overrides(settings)))


def _newest_record(fs: Storage, root: str) -> tuple[str, StoredConfig] | None:
    """The path of the newest checkpoint in a folder that says how its run was configured, and what it says."""
    steps = [(step, name) for name in fs.names(root) for each in NAMINGS.values() if (step := each.step_of(name))]
    for _, name in sorted(steps, reverse=True):
        path = os.path.join(root, name)
        try:
            return path, stored_config(path, fs)
        except CheckpointError as error:  # it may be damaged, which the restore finds, or no manager saved it
            logger.info("whose checkpoint %s is, is unknown: %s", path, error)
    return None


def _put_or_read(fs: Storage, path: str, mine: dict[str, Any]) -> dict[str, Any]:
    """Create the file in one step, or read the one that another job created."""
    data = json.dumps(mine, indent=2).encode()
    fs.make_folders(os.path.dirname(path))
    draft = f"{path}.{new_token(fs.outside)}"
    fs.write_new(draft, data)
    try:
        fs.put_new(path, data, draft)
        return mine
    except FileExistsError:
        owner = json.loads(fs.read(path, _CLAIM_BYTES))
        whole = isinstance(owner, dict) and owner.keys() >= mine.keys() and isinstance(owner["overrides"], list)
        if not whole:
            raise ValueError("it was not written by ckpt_component") from None
        return dict(owner)
    finally:
        fs.unlink(draft)


def run_app(config_name: str, task: Callable[[DictConfig], Any], roots: Sequence[str]) -> None:
    """Run the command line.

    Args:
        config_name: the app's primary config
        task: the function to run for each job
        roots: top-level keys and groups that overrides may begin with
    """
    # Hydra 1.4 warns of every target that is not on an allowlist. A list of ours would exclude users' callbacks.
    warnings.filterwarnings("ignore", message=r".*_target_='ckpt_component\.cli\.reports\.callback\.")
    # Hydra 1.4 has only this behaviour, and warns about the argument.
    version = {"version_base": "1.3"} if hydra.__version__ < "1.4" else {}
    with command_line(roots):
        hydra.main(config_path=str(config_dir()), config_name=config_name, **version)(task)()
