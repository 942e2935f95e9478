"""Where the checkpoints of a job go that Hydra runs, and what a job is told of another one in the same folder."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf
from ranks import run_ranks

from ckpt_component import CheckpointConfigError, build_manager, stored_config
from ckpt_component.config.hydra import hydra_job

RESTORE_ONLY = ["checkpoint.save.every_steps=null", "checkpoint.save.at_end=false"]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Stand in a job of Hydra's; gives the job's output folder."""
    monkeypatch.chdir(tmp_path)
    before = HydraConfig.instance().cfg

    def begin(number: int, mode: RunMode = RunMode.MULTIRUN, **runtime: Any) -> Path:
        folder = tmp_path / "multirun" / str(number)
        settings = {
            "mode": mode,
            "runtime": {"output_dir": str(folder), "cwd": str(tmp_path), **runtime},
            "sweep": {"dir": "multirun"},
            "overrides": {"task": [f"number={number}"]},
        }
        HydraConfig.instance().cfg = OmegaConf.create({"hydra": settings})  # type: ignore[assignment]
        return folder

    yield begin
    HydraConfig.instance().cfg = before


def trained(*overrides: str, dir: str | Path | None = None) -> list[int]:
    """Run a loop to step 3; gives the steps that it trained."""
    state = {"weight": torch.zeros(2)}
    with build_manager("sync", ["checkpoint.save.every_steps=1", *overrides], dir=dir) as manager:
        steps = list(range((manager.restore(state) or 0) + 1, 4))
        for step in steps:
            manager.maybe_save(step, state)
    return steps


@pytest.mark.parametrize("where", [{}, {"dir": "mine"}], ids=["preset", "argument"])
def test_jobs_of_a_multirun_do_not_resume_from_each_other(
    job: Callable[..., Path], where: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for number in range(2):
        folder = job(number) / where.get("dir", "checkpoints")
        assert trained(**where) == [1, 2, 3] and (folder / "iter_0000003").is_dir()
        assert f"checkpoints of this job go to {folder}" in caplog.text
    job(0)
    assert trained(**where) == []  # the same job again goes on


@pytest.mark.slow
def test_the_jobs_of_a_multirun_store_the_base_that_they_share_once(job: Callable[..., Path], tmp_path: Path) -> None:
    base = {f"layer{number}": torch.randn(100_000) for number in range(8)}
    for number in range(8):
        job(number)
        adapter = torch.full((1000,), float(number))
        with build_manager("sync", ["checkpoint.save.every_steps=1", "checkpoint.reuse.frozen=[base.*]"]) as manager:
            for step in (1, 2):
                manager.maybe_save(step, {"base": base, "adapter": adapter.add_(1)})
    files = {path.stat().st_ino: path.stat() for path in tmp_path.rglob("*.distcp")}
    assert len(files) == 1 + 8 * 2
    assert sum(file.st_size for file in files.values()) < 8 * 400_000 + 16 * 5000 + 10_000
    assert max(file.st_nlink for file in files.values()) == 8 * 2


def test_jobs_that_begin_together_share_from_a_later_save_on(job: Callable[..., Path], tmp_path: Path) -> None:
    base = {f"layer{number}": torch.randn(100_000) for number in range(8)}
    managers = []
    for number in (1, 0):
        root = job(number) / "checkpoints"
        aside = tmp_path / "aside"
        managers.append(build_manager("sync", ["checkpoint.save.every_steps=1", "checkpoint.reuse.frozen=[base.*]"]))
        if number == 0:  # as if the other job's checkpoint was not committed yet
            others = root.parents[1] / "1" / "checkpoints" / "iter_0000001"
            others.rename(aside)
        managers[-1].save(1, {"base": base, "adapter": torch.full((1000,), 1.0)})
        if number == 0:
            aside.rename(others)

    def inodes(step: int) -> set[int]:
        paths = tmp_path.glob(f"multirun/*/checkpoints/iter_{step:07}/*.distcp")
        return {path.stat().st_ino for path in paths if path.stat().st_size > 100_000}

    assert len(inodes(1)) == 2
    for step in (2, 3):
        for manager in managers:
            manager.save(step, {"base": base, "adapter": torch.full((1000,), float(step))})
        assert len(inodes(step)) == 1
    for manager in managers:
        manager.close()


def test_elsewhere_a_relative_folder_starts_from_the_current_one(job: Callable[..., Path], tmp_path: Path) -> None:
    job(0, mode=RunMode.RUN)
    trained()
    assert (tmp_path / "checkpoints" / "iter_0000003").is_dir()
    job(0, output_dir="???")  # composed, and not run by Hydra
    assert trained() == []


def test_two_jobs_of_a_multirun_that_save_in_one_folder_are_refused(job: Callable[..., Path], tmp_path: Path) -> None:
    first, same = job(0), tmp_path / "same"
    trained(dir=same)
    assert trained(dir=same) == []
    job(1)
    with pytest.raises(CheckpointConfigError) as caught:
        trained(f"checkpoint.dir={same}")
    assert (
        f"also the folder of another job of this multirun ({first}, says {tmp_path}/multirun/.checkpoint_dirs/"
        in str(caught.value)
    )
    assert "'checkpoint.dir=/data/${hydra:sweep.subdir}'" in str(caught.value)
    with build_manager("sync", RESTORE_ONLY, dir=same) as manager:  # jobs may well start from one checkpoint
        assert manager.restore({"weight": torch.zeros(2)}) == 3


@pytest.mark.slow
def test_jobs_in_other_processes_are_refused_too(job: Callable[..., Path], tmp_path: Path) -> None:
    """As joblib and submitit run them: what one process knows, another one reads from the multirun's folder."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from hydra_ranks import in_job; "
        "from ckpt_component import build_manager; in_job(sys.argv[2], 0); build_manager('sync', dir=sys.argv[3]).close()"
    )
    scripts = Path(__file__).parent / "scripts"
    subprocess.run([sys.executable, "-c", code, scripts, tmp_path, tmp_path / "same"], check=True, timeout=60)
    job(1)
    with pytest.raises(CheckpointConfigError, match="also the folder of another job of this multirun"):
        trained(dir=tmp_path / "same")
    job(0)
    assert trained(dir=tmp_path / "same") == [1, 2, 3]


def test_a_job_that_has_another_number_in_a_later_multirun_is_the_same_job(
    job: Callable[..., Path], tmp_path: Path
) -> None:
    job(0)
    trained(dir=tmp_path / "same")
    job(5)
    HydraConfig.get().overrides.task = ["number=0"]
    assert trained(dir=tmp_path / "same") == []


def typed(*overrides: str) -> None:
    """The overrides of the job that the test stands in."""
    HydraConfig.get().overrides.task = list(overrides)


def test_a_job_does_not_resume_from_a_job_of_its_number_with_other_values(
    job: Callable[..., Path], tmp_path: Path
) -> None:
    job(0)
    typed("lr=0.003", "steps=3")
    trained()
    job(0)
    typed("lr=0.001", "steps=3", "checkpoint.keep.last=2")
    folder = tmp_path / "multirun" / "0" / "checkpoints"
    with pytest.raises(CheckpointConfigError) as caught:
        trained()
    assert f"{folder} is of a job with lr=0.003, and this one has lr=0.001; " in str(caught.value)
    assert "hydra/callbacks=checkpoint_report" in str(caught.value)
    with build_manager("sync", RESTORE_ONLY) as manager:  # it may well start from there
        assert manager.restore({"weight": torch.zeros(2)}) == 3


@pytest.mark.parametrize("words", [["steps=3", "lr=1"], ["lr=1", "steps=3", "checkpoint.keep.last=2"]])
def test_a_job_that_saves_otherwise_is_the_same_job(job: Callable[..., Path], words: list[str]) -> None:
    job(0)
    typed("lr=1", "steps=3")
    trained()
    job(0)
    typed(*words)
    assert trained() == []


def test_a_job_that_left_nothing_leaves_its_folder(job: Callable[..., Path]) -> None:
    job(0)
    typed("lr=1")
    build_manager("sync", ["checkpoint.save.at_end=false"]).close()
    for _ in range(2):
        job(0)
        typed("lr=2")
        assert trained() in ([1, 2, 3], [])
    job(0)
    typed("lr=1")
    with pytest.raises(CheckpointConfigError, match="with lr=2, and this one has lr=1;"):
        trained()


@pytest.mark.parametrize(
    ("now", "told"), [(["lr=1", "wd=2"], "without wd=2, and this one has"), ([], "with lr=1, and")]
)
def test_a_folder_that_sweeps_share_is_that_of_the_job_that_saved_there(
    job: Callable[..., Path], tmp_path: Path, now: list[str], told: str
) -> None:
    """The claims are those of one multirun; the checkpoints themselves say whose they are."""
    shared = tmp_path / "shared" / "0"
    job(0)
    typed("lr=1", "password=hunter2")
    trained(dir=shared)
    job(0)
    (tmp_path / "multirun").rename(tmp_path / "another")
    typed(*now, "password=hunter3")
    with pytest.raises(CheckpointConfigError, match=f"{shared}/iter_0000003 is of a job {told}"):
        trained(dir=shared)
    (tmp_path / "multirun").rename(tmp_path / "one_more")
    typed("password=hunter3", "lr=1")
    assert trained(dir=shared) == []
    stored = stored_config(shared / "iter_0000003")
    assert stored.overrides == ["lr=1", "password=<hidden>"]


def test_an_override_that_refers_to_other_values_is_compared_as_it_was_typed(job: Callable[..., Path]) -> None:
    for number in (0, 1):
        folder = job(0, choices={}).parent
        typed("lr=${oc.env:HOME}", "seed=${hydra:job.num}", "checkpoint.dir=${hydra:sweep.dir}/shared")
        assert trained(dir=folder / "shared") == [[1, 2, 3], []][number]


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"job": 1}', b'{"job": "0", "dir": "0", "overrides": null}'],
)
def test_a_damaged_record_is_a_warning(
    job: Callable[..., Path], tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    job(0)
    trained(dir=tmp_path / "same")
    [record] = (tmp_path / "multirun" / ".checkpoint_dirs").iterdir()
    record.write_bytes(content)
    job(1)
    trained(dir=tmp_path / "same")
    assert f"{record} cannot be used, so jobs that save in one folder go unnoticed" in caplog.text


@pytest.mark.parametrize(
    ("overrides", "steps", "told"), [([], [], True), ([], [3], True), ([], [4], False), (RESTORE_ONLY, [], False)]
)
def test_a_resume_that_leaves_nothing_to_train_is_told_at_the_end(
    tmp_path: Path, overrides: list[str], steps: list[int], told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    trained(dir=tmp_path)
    with build_manager("sync", overrides, dir=tmp_path) as manager:
        state = {"weight": torch.zeros(2)}
        manager.restore(state)
        for step in steps:
            manager.maybe_save(step, state)
    assert manager.idle == (3 if told else None)
    assert (
        caplog.messages.count(f"restored step 3 from {tmp_path} and saw no further step: nothing was trained") == told
    )


def test_a_loop_that_failed_before_its_first_step_is_not_told_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(dir=tmp_path)
    with pytest.raises(ZeroDivisionError), build_manager("sync", dir=tmp_path) as manager:
        manager.restore({"weight": torch.zeros(2)})
        raise ZeroDivisionError
    assert "nothing was trained" not in caplog.text


@pytest.mark.slow
def test_ranks_of_a_job_save_where_rank_0_says(tmp_path: Path) -> None:
    script = Path(__file__).parent / "scripts" / "hydra_ranks.py"
    path = tmp_path / "multirun" / "0" / "checkpoints" / "iter_0000001"
    assert [output.strip() for output in run_ranks(script, "save_in_own_output", 2, tmp_path)] == [str(path)] * 2
    assert (path / "manifest.json").is_file()


def test_two_jobs_that_spell_one_folder_differently_are_refused(job: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "lustre").mkdir()
    (tmp_path / "scratch").symlink_to("lustre")
    job(0)
    trained(dir=tmp_path / "lustre" / "same")
    job(1)
    for spelling in ("scratch/same", "lustre/../scratch/same/"):
        with pytest.raises(CheckpointConfigError, match="also the folder of another job of this multirun"):
            trained(dir=f"{tmp_path}/{spelling}")
    (tmp_path / "lustre" / "same").rename(tmp_path / "lustre" / "old")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "lustre" / "same").symlink_to("../elsewhere")
    assert trained(dir=tmp_path / "scratch" / "same") == [1, 2, 3]  # another folder has the name now


def test_a_folder_with_the_inode_of_a_deleted_one_is_another_folder(
    job: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hydra_job, "folder_id", lambda root: "1:2")
    job(0)
    trained(dir=tmp_path / "first")
    shutil.rmtree(tmp_path / "first")
    job(1)
    assert trained(dir=tmp_path / "second") == [1, 2, 3]
    job(0)
    with pytest.raises(CheckpointConfigError, match="also the folder of another job"):
        trained(dir=tmp_path / "second")
