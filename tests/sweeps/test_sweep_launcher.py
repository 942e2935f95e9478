"""Which folder a job of a sweep gets, and which jobs need not run again, by the `result.json` of earlier ones."""

from __future__ import annotations

import json
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ckpt_component import CheckpointConfigError
from ckpt_component.cli.reports.result import add_returned, read_jobs, write_result
from ckpt_component.cli.reports.sweep_launcher import EarlierJobs, SweepLauncher, UnlessEnded, continue_sweep

#: The number and the overrides of a job.
Launched = tuple[int, list[str]]


class Recording(Launcher):
    """Runs nothing, and notes what it was given; each job writes its result and returns its number."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launched: list[Launched] = []
        self.status = "completed"

    def setup(self, **_: Any) -> None: ...

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        results = []
        for number, words in enumerate(job_overrides, initial_job_idx):
            self.launched.append((number, list(words)))
            name = next((word[len(SUBDIR) : -1] for word in words if word.startswith(SUBDIR)), str(number))
            words = [word for word in words if not word.startswith("hydra.")]
            left(self.folder, name, *words, status=self.status, value=number)
            where = OmegaConf.create({"hydra": {"runtime": {"output_dir": str(self.folder / name)}}})
            results.append(
                JobReturn(overrides=words, hydra_cfg=where, status=JobStatus.COMPLETED, _return_value=number)
            )
        return results


SUBDIR = "hydra.sweep.subdir='"


def left(folder: Path, name: str, *overrides: str, status: str = "completed", value: Any = None) -> None:
    """Leave what a job leaves."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    write_result(str(folder / name), status, overrides=overrides, choices={})
    add_returned(str(folder / name), value)


def multirun(folder: Path, *task: str, subdir: str = "${hydra.job.num}") -> DictConfig:
    """The config of a multirun, as far as it matters."""
    tree = {"sweep": {"dir": str(folder), "subdir": subdir}, "overrides": {"task": list(task)}, "job": {"num": "???"}}
    return OmegaConf.create({"hydra": tree})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "sweep"


def launched(
    folder: Path, jobs: Sequence[Sequence[str]], *task: str, **config: str
) -> tuple[list[Launched], list[Any]]:
    """Launch these jobs; gives those that ran, and what all of them returned."""
    inner = Recording(folder)
    launcher = SweepLauncher(inner, EarlierJobs(), multirun(folder, *task, **config), leads=True)
    results = launcher.launch(jobs, 0)
    assert [result.overrides for result in results] == [list(job) for job in jobs]
    return inner.launched, [result.return_value for result in results]


def test_a_new_sweep_is_launched_as_it_is(folder: Path) -> None:
    jobs = [["lr=1"], ["lr=2"]]
    assert launched(folder, jobs, "lr=1,2") == ([(0, ["lr=1"]), (1, ["lr=2"])], [0, 1])


def test_jobs_that_ended_return_at_once_and_others_run_in_the_folder_of_their_overrides(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    left(folder, "0", "lr=1", "steps=9", value=0.25)
    left(folder, "1", "lr=2", "steps=9", status="running")
    left(folder, "2", "lr=3", "steps=9", status="failed")
    jobs = [[f"lr={lr}", "steps=9"] for lr in (3, 1, 2, 4)]
    ran, returned = launched(folder, jobs, "lr=3,1,2,4", "steps=9")
    assert ran == [
        (0, [*jobs[0], f"{SUBDIR}2'"]),
        (1, [*jobs[1], f"{SUBDIR}0'"]),  # between others, so that they may run together and keep their numbers
        (2, [*jobs[2], f"{SUBDIR}1'"]),
        (3, jobs[3]),
    ]
    assert returned[2:] == [2, 3]
    told = [message.strip() for message in caplog.messages]
    assert [text.partition(" in ")[0] for text in told if text.startswith("#")] == [
        "#0 : runs again",
        f"#1 : ended before, and returns 0.25 as {os.path.relpath(folder / '0')}/result.json says",
        "#2 : continues",
    ]


def test_nothing_is_launched_before_and_after_what_must_run(folder: Path) -> None:
    for number, lr in enumerate("abcd"):
        left(folder, str(number), f"lr={lr}", value=lr, status="running" if lr == "c" else "completed")
    assert launched(folder, [[f"lr={lr}"] for lr in "abcd"], "lr=a,b,c,d") == ([(2, ["lr=c"])], ["a", "b", 2, "d"])
    assert launched(folder, [[f"lr={lr}"] for lr in "abcd"], "lr=a,b,c,d") == ([], ["a", "b", 2, "d"])


def test_other_values_never_get_the_folder_of_another_job(folder: Path) -> None:
    left(folder, "0", "lr=1", value=1.0)
    left(folder, "1", "lr=2", status="running")
    ran, returned = launched(folder, [["lr=3"], ["lr=1"], ["lr=4"], ["lr=5"]], "lr=3,1,4,5")
    assert ran == [
        (0, ["lr=3", f"{SUBDIR}2'"]),
        (1, ["lr=1", f"{SUBDIR}0'"]),
        (2, ["lr=4", f"{SUBDIR}3'"]),
        (3, ["lr=5", f"{SUBDIR}4'"]),
    ]
    assert (returned[0], returned[2:]) == (0, [2, 3])


def test_the_order_of_overrides_does_not_matter(folder: Path) -> None:
    left(folder, "0", "lr=1", "wd=2", value=7)
    assert launched(folder, [["wd=2", "lr=1"]], "wd=2", "lr=1") == ([], [7])


def test_a_change_of_how_all_jobs_save_makes_no_other_job(folder: Path) -> None:
    left(folder, "0", "lr=1", value=7)
    left(folder, "1", "lr=2", "checkpoint.dir=x", status="running")
    jobs = [[f"lr={lr}", "checkpoint.keep.last=1", "checkpoint/writer=dcp"] for lr in (1, 2)]
    ran, returned = launched(folder, jobs, "lr=1,2", "checkpoint.keep.last=1", "checkpoint/writer=dcp")
    assert ran == [(1, jobs[1])] and returned == [7, 1]


def test_in_a_sweep_over_how_to_save_each_value_is_another_job(folder: Path) -> None:
    left(folder, "0", "lr=1", "checkpoint.writer.workers=1", value=7)
    jobs = [["lr=1", f"checkpoint.writer.workers={workers}"] for workers in (2, 1)]
    ran, returned = launched(folder, jobs, "lr=1", "checkpoint.writer.workers=2,1")
    assert ran == [(0, [*jobs[0], f"{SUBDIR}1'"])] and returned == [0, 7]
    # And if the values of such a sweep differ, none of them is taken for one that all jobs have.
    jobs = [["lr=1", "checkpoint.writer.workers=4"]]
    assert launched(folder, jobs, "lr=1", "checkpoint.writer.workers=4") == ([(0, [*jobs[0], f"{SUBDIR}2'"])], [0])


def test_jobs_with_equal_overrides_run_once_each_in_a_grid_and_once_in_a_study(folder: Path) -> None:
    assert [number for number, _ in launched(folder / "grid", [["lr=1"], ["lr=1"]])[0]] == [0, 1]
    assert launched(folder / "grid", [["lr=1"], ["lr=1"], ["lr=1"]]) == ([], [0, 1, 0])
    inner = Recording(folder / "study")
    launcher = SweepLauncher(inner, EarlierJobs(), multirun(folder / "study"), leads=False)
    results = [launcher.launch([[f"lr={lr}"]], number)[0].return_value for number, lr in enumerate((1, 2, 1, 3, 2))]
    assert results == [0, 1, 0, 3, 1] and [number for number, _ in inner.launched] == [0, 1, 3]


def test_a_folder_name_of_the_users_own_stays(folder: Path) -> None:
    left(folder, "it's 1", "lr=1", status="running")
    jobs = [["lr=2"], ["lr=1"]]
    ran, _ = launched(folder, jobs, "lr=2,1", subdir="it's ${lr}")
    assert ran == [(0, jobs[0]), (1, ["lr=1", "hydra.sweep.subdir='it\\'s 1'"])]


DAMAGED = '{"status": "completed", "reason": null, "overrides": ["lr=1"], "figures": {}, "returned": "{"}'


@pytest.mark.parametrize("text", ["0.5", "{", '{"status": "completed"}', DAMAGED])
def test_a_result_of_another_program_is_not_used(folder: Path, text: str) -> None:
    (folder / "0").mkdir(parents=True)
    (folder / "0" / "result.json").write_text(text)
    inner = Recording(folder / "elsewhere")
    launcher = SweepLauncher(inner, EarlierJobs(), multirun(folder), leads=True)
    assert launcher.launch([["lr=1"]], 0)[0].return_value == 0 and inner.launched == [(0, ["lr=1"])]


class _Scalar:
    """As those of NumPy and torch."""

    def item(self) -> float:
        return 0.5


@pytest.mark.parametrize(
    ("value", "again"),
    [(None, None), (0.1, 0.1), (float("inf"), float("inf")), ((1, 2.5), [1, 2.5]), ({"a": _Scalar()}, {"a": 0.5})],
)
def test_what_a_job_returned_is_kept(folder: Path, value: Any, again: Any) -> None:
    left(folder, "0", "lr=1", value=value)
    assert launched(folder, [["lr=1"]]) == ([], [again])
    json.loads((folder / "0" / "result.json").read_text(), parse_constant=pytest.fail)  # for other programs
    assert read_jobs(folder)[0].returned == again


def test_a_job_runs_again_if_what_it_returned_cannot_be_kept(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    left(folder, "0", "lr=1", value=folder)
    assert launched(folder, [["lr=1"]]) == ([(0, ["lr=1"])], [0])
    assert any(
        "0 runs again if its sweep continues, because what it returned cannot be kept" in m for m in caplog.messages
    )


@pytest.fixture
def in_job(folder: Path) -> Iterator[Callable[..., None]]:
    """Stand in a job of Hydra's."""
    before = HydraConfig.instance().cfg

    def begin(number: int, name: str, *overrides: str, mode: RunMode = RunMode.MULTIRUN) -> None:
        tree = {
            "mode": mode,
            "job": {"num": number},
            "runtime": {"output_dir": str(folder / name), "cwd": "/"},
            "sweep": {"dir": str(folder)},
            "overrides": {"task": list(overrides)},
        }
        HydraConfig.instance().cfg = OmegaConf.create({"hydra": tree})  # type: ignore[assignment]

    yield begin
    HydraConfig.instance().cfg = before


def task(config: DictConfig) -> str:
    return "it ran"


def test_the_function_is_not_called_for_a_job_that_ended_nor_in_the_folder_of_another(
    folder: Path, in_job: Callable[..., None]
) -> None:
    earlier = EarlierJobs({1: [0.5]}, {"a": ["lr=1", "checkpoint.dir=x"], "0": ["lr=3"]})
    call = pickle.loads(pickle.dumps(UnlessEnded(task, earlier)))  # as it comes to the process of a job
    in_job(1, "0", "lr=3")
    assert call(OmegaConf.create()) == [0.5]
    for place, words in ((2, ["lr=1"]), (3, ["lr=1", "checkpoint.dir=y"])):
        in_job(place, "a", *words)
        assert call(OmegaConf.create()) == "it ran"
    in_job(2, "a", "lr=2")
    with pytest.raises(
        CheckpointConfigError, match="is the folder of another job, with lr=1 .*, and this one has lr=2"
    ):
        call(OmegaConf.create())
    in_job(1, "a", "lr=2", mode=RunMode.RUN)
    assert call(OmegaConf.create()) == "it ran"


def test_the_next_launcher_alone_is_put_into_ours(folder: Path) -> None:
    plugins, node = (
        Plugins.instance(),
        {"launcher": {"_target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher"}},
    )
    config = OmegaConf.merge(multirun(folder), {"hydra": node})
    assert isinstance(config, DictConfig)
    continue_sweep(config, leads=True)
    context: Any = None
    kinds = [
        type(plugins.instantiate_launcher(hydra_context=context, task_function=task, config=config)).__name__
        for _ in range(2)
    ]
    assert kinds == ["SweepLauncher", "BasicLauncher"]
