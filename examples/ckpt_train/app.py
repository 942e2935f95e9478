"""`ckpt-train`, the same as `python -m ckpt_component.train`: one training run or a sweep, from Hydra.

torch is imported when a run begins, so that `--help` and shell completion are fast.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ckpt_component.cli.reports.result import write_job_result
from ckpt_component.config import resolve_config
from ckpt_component.config.hydra.hydra_errors import CheckpointConfigError, HydraConfigError, for_hydra
from ckpt_component.config.hydra.hydra_job import run_app
from ckpt_component.config.hydra.read import omegaconf_text
from ckpt_component.core.storage.locate import is_url
from ckpt_component.errors import CheckpointError

from .objectives import objective_names, objectives_of, refuse_typos
from .ranks import ALONE, Ranks, meet, part
from .schema import register

logger = logging.getLogger(__name__)

#: Top-level keys and groups that overrides may begin with.
_ROOTS = ("checkpoint", "data", "model", "objectives", "parallel", "recipe", "train")


class TrainingFailed(CompactHydraException, CheckpointError):
    """A checkpoint error ended the run and is the cause of this one. Hydra prints the text without a traceback."""


def run_job(config: DictConfig, ranks: Ranks = ALONE) -> float | list[float] | None:
    """Run the training job of a config. Rank 0 writes the figures to `result.json` in the output folder.

    Returns:
        The figures that `objectives` names, for a sweeper, by default how long a save blocked training, in seconds;
        None if there are none, or if a job of a sweep was skipped because its parts are incompatible.

    Raises:
        CheckpointConfigError: a value is invalid
        TrainingFailed: a save or a load failed
        SystemExit: a signal stopped the run, after saving its last step
    """
    _refuse_unreadable(config)
    objectives = objective_names(config)
    swept = HydraConfig.get().mode == RunMode.MULTIRUN
    launch_dir = str(HydraConfig.get().runtime.cwd)  # os.getcwd() may be the output folder: hydra.job.chdir=true
    try:
        # The same command in the same folder resumes its run; `build_manager` keeps the jobs of a sweep apart.
        folder = resolve_config(config.checkpoint).dir
        folder = folder if is_url(folder) else os.path.join(launch_dir, folder)
    except CheckpointConfigError as refusal:
        _skip(refusal, swept, ranks)
        return None
    # Imported late, because importing torch takes seconds.
    from .loop import run
    from .training_job import TrainingJob

    job = TrainingJob(config, launch_dir, ranks)
    try:
        with for_hydra():
            summary = run(job, config.checkpoint, None if swept else folder)
    except CheckpointConfigError as refusal:
        _skip(refusal, swept, ranks)
        return None
    except CheckpointError as error:
        where = "" if ranks.world_size == 1 else f"rank {ranks.rank}: "
        raise TrainingFailed(f"{where}{type(error).__name__}: {error}") from error
    figures = summary.figures()
    status, reason = "completed", None
    if summary.stopped_by is not None:
        status, reason = "stopped", summary.stopped_by.name
    elif summary.step == summary.start:
        reason = f"restored step {summary.start} and trained nothing"
    if ranks.rank == 0:
        write_job_result(status, figures=figures, reason=reason)
    if summary.stopped_by is not None:
        part(ranks)
        summary.leave()
    return objectives_of(objectives, figures)


def _skip(refusal: CheckpointConfigError, swept: bool, ranks: Ranks) -> None:
    """Skip a job of a sweep: a grid of parts has incompatible pairs, and the other jobs must still run."""
    if not swept:
        raise refusal
    logger.warning("skipped: %s", refusal)
    if ranks.rank == 0:
        write_job_result("skipped", reason=str(refusal))


def main() -> None:
    """Run the command line."""
    # torch's CPU threads spin between operations by default, which is slow on shared cores: with another busy
    # process a step of gpt_nano took 2.8 s, and 0.26 s with this. torch reads it when imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # torch warns at its first tensor if NumPy is missing, which is not needed here.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    register()
    try:
        refuse_typos(sys.argv[1:])
        ranks = meet()
    except CheckpointConfigError as error:
        sys.exit(str(error))

    run_app("train", lambda config: run_job(config, ranks), _ROOTS)
    part(ranks)


def _refuse_unreadable(config: DictConfig) -> None:
    """Refuse a config without `checkpoint`, and interpolations that cannot be resolved."""
    if OmegaConf.is_missing(config, "checkpoint") or config.get("checkpoint") is None:
        raise HydraConfigError("The config has no checkpoint. To save nothing, type checkpoint=off.")
    try:
        OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise HydraConfigError(omegaconf_text(error, "")) from None


if __name__ == "__main__":
    main()
