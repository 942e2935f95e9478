"""Continues a sweep in the folder of an earlier one: a job is its overrides, whatever its number.

A job that ended returns at once what its `result.json` says that it returned. One that was interrupted runs in the
folder that it began in, from its newest checkpoint on. Others are new, and get folders of their own.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from ...config.hydra.hydra_errors import HydraConfigError
from ...config.hydra.hydra_job import is_about_saving, multirun_job, task_overrides, train_alike
from ...config.hydra.overrides import parse_override
from .result import RUNNING, STOPPED, has_ended, job_folders, read_result, returned_value

logger = logging.getLogger(__name__)

#: Hydra's default for the name of a job's folder.
_BY_NUMBER = "${hydra.job.num}"


@dataclass
class EarlierJobs:
    """What the jobs of a sweep know of those that ran before in its folder; a copy of it goes to each job's process.

    Attributes:
        ended: by the number of a job that need not run again, what it returned
        overrides: by the name of a folder that an earlier run of the sweep has left, the overrides of its job
    """

    ended: dict[int, Any] = field(default_factory=dict)
    overrides: dict[str, Sequence[str]] = field(default_factory=dict)

    def has_ended(self) -> bool:
        """Whether the job of this process need not run again."""
        return multirun_job() is not None and HydraConfig.get().job.num in self.ended

    def overrides_of_another(self) -> Sequence[str] | None:
        """The overrides of the job that has left the folder of this process's job; None: it is a folder of its own."""
        job = multirun_job()
        theirs = None if job is None else self.overrides.get(os.path.relpath(job.output_dir, job.sweep_dir))
        return None if job is None or theirs is None or train_alike(theirs, job.overrides) else theirs


class UnlessEnded:
    """The app's function, which is not called for a job that has ended; then it returns what that one returned.

    Args:
        task: the function
        earlier: the jobs that ran before
    """

    def __init__(self, task: TaskFunction, earlier: EarlierJobs) -> None:
        self._task = task
        self._earlier = earlier

    def __call__(self, config: DictConfig) -> Any:
        """Called by the launcher in the process of a job.

        Raises:
            CheckpointConfigError: the job's folder is that of another job
        """
        if self._earlier.has_ended():
            return self._earlier.ended[HydraConfig.get().job.num]
        theirs = self._earlier.overrides_of_another()
        if theirs is not None:
            settings = HydraConfig.get()
            raise HydraConfigError(
                f"{settings.runtime.output_dir} is the folder of another job, with {' '.join(theirs)}, and this one "
                f"has {' '.join(task_overrides(settings))}. Use another hydra.sweep.dir, or leave out "
                "hydra.sweep.subdir: then each job finds a folder of its own."
            )
        return self._task(config)


@dataclass(frozen=True)
class _EarlierJob:
    """A job that has run in the sweep's folder, by its `result.json`."""

    name: str
    overrides: Sequence[str]
    status: str
    ended: bool
    value: Any


class SweepLauncher(Launcher):
    """Has another launcher run the jobs that have not ended, each in its folder.

    Args:
        launcher: runs the jobs; it is set up
        earlier: takes what the jobs must know
        config: of the multirun
        leads: whether to log what becomes of each job
    """

    def __init__(self, launcher: Launcher, earlier: EarlierJobs, config: DictConfig, *, leads: bool) -> None:
        self._launcher = launcher
        self._earlier = earlier
        self._leads = leads
        self._folder = Path(os.path.abspath(str(config.hydra.sweep.dir)))
        self._by_number = OmegaConf.to_container(config.hydra.sweep, resolve=False)["subdir"] == _BY_NUMBER  # type: ignore[call-overload,index]
        typed = map(parse_override, task_overrides(config.hydra))
        #: The keys that have the same value in all jobs.
        self._fixed = {override.key_or_group for override in typed if not override.is_sweep_override()}
        self._jobs = {job.name: job for job in map(self._read, job_folders(self._folder)) if job is not None}
        earlier.overrides = {job.name: job.overrides for job in self._jobs.values()}
        #: The folders of jobs that this run of the sweep has launched.
        self._taken: set[str] = set()

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra for the launchers that it builds."""
        self._launcher.setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Called by a sweeper; gives what each job returned."""
        jobs, results = list[list[str]](), list[JobReturn]()
        for number, words in enumerate(job_overrides, initial_job_idx):
            name = self._place(words, number)
            is_default = name is None or (self._by_number and name == str(number))
            jobs.append([*words] if is_default else [*words, f"hydra.sweep.subdir={_quoted(str(name))}"])
            results.append(JobReturn(overrides=list(words), working_dir=os.getcwd(), status=JobStatus.COMPLETED))
            results[-1].return_value = self._earlier.ended.get(number)
        waiting = [at for at in range(len(jobs)) if initial_job_idx + at not in self._earlier.ended]
        if waiting:
            # All from the first to the last of them: a launcher numbers what it is given, and may run it together.
            begin, end = waiting[0], waiting[-1] + 1
            results[begin:end] = self._launcher.launch(jobs[begin:end], initial_job_idx + begin)
            for result in results[begin:end]:
                # A sweeper may ask for a job again that has ended by then.
                job = None if result.hydra_cfg is None else self._read(Path(result.hydra_cfg.hydra.runtime.output_dir))
                if job is not None:
                    self._jobs[job.name] = job
                    self._taken.add(job.name)
        return results

    def _place(self, words: Sequence[str], number: int) -> str | None:
        """Find the folder of a job, and whether it has ended.

        Returns:
            The folder's name in the sweep's; None: as `hydra.sweep.subdir` says.
        """
        job = next(iter(self._like(words)), None)
        if job is not None:
            where, name = os.path.relpath(self._folder / job.name), job.name
            if job.ended:
                self._earlier.ended[number] = job.value
                self._log(number, f"ended before, and returns {job.value} as {where}/result.json says")
            else:
                self._log(number, f"{'continues' if job.status in (RUNNING, STOPPED) else 'runs again'} in {where}")
        elif self._by_number:
            used = self._jobs.keys() | self._taken
            name = next(name for name in map(str, itertools.count(number)) if name not in used)
            if name != str(number):
                self._log(number, f"runs in {name}, because {number} is the folder of a job with other overrides")
        else:
            return None
        self._taken.add(name)
        return name

    def _log(self, number: int, text: str) -> None:
        if self._leads:
            logger.info("\t#%d : %s", number, text)

    def _like(self, words: Sequence[str]) -> list[_EarlierJob]:
        """The earlier jobs that this one may be, the best first."""
        same = [job for job in self._jobs.values() if sorted(job.overrides) == sorted(words)]
        if not same:
            # With another value of how all jobs save, it is the same job; but where several differ in nothing else, a
            # sweep over that has left them.
            swept = {_key(word) for word in words} - self._fixed
            same = [job for job in self._jobs.values() if _kind(job.overrides, swept) == _kind(words, swept)]
            same = same if len(same) == 1 else []
        free = [job for job in same if job.name not in self._taken]
        return sorted(free, key=lambda job: not job.ended) or [job for job in same if job.ended]

    def _read(self, folder: Path) -> _EarlierJob | None:
        try:
            content = read_result(str(folder))
            if content is None:
                return None
            ended = has_ended(content)
            value = returned_value(content) if ended else None
        except (OSError, ValueError) as error:
            logger.info("%s is not used to continue the sweep, because its result cannot be read: %s", folder, error)
            return None
        name = os.path.relpath(folder, self._folder)
        return _EarlierJob(name, tuple(map(str, content["overrides"])), content["status"], ended, value)


def continue_sweep(config: DictConfig, *, leads: bool) -> EarlierJobs:
    """Have the sweep that Hydra is about to begin continue what is in its folder.

    Hydra has nothing between a sweeper and its launcher, so the next launcher that it builds is put into one of ours.

    Args:
        config: of the multirun
        leads: whether to log what becomes of each job

    Returns:
        What its jobs know of earlier ones, once they are launched.
    """
    earlier, plugins = EarlierJobs(), Plugins.instance()

    def instantiate_launcher(
        hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> SweepLauncher:
        delattr(plugins, "instantiate_launcher")  # from now on that of the class again
        task = UnlessEnded(task_function, earlier)
        launcher = plugins.instantiate_launcher(hydra_context=hydra_context, task_function=task, config=config)
        return SweepLauncher(launcher, earlier, config, leads=leads)

    setattr(plugins, "instantiate_launcher", instantiate_launcher)  # noqa: B010
    return earlier


def _kind(words: Sequence[str], swept: set[str]) -> list[str]:
    """What makes a job another one: what it trains, and how it saves if the sweep is over that."""
    return sorted(word for word in words if not is_about_saving(word) or _key(word) in swept)


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _quoted(name: str) -> str:
    return "'" + name.replace("'", r"\'") + "'"
