"""`checkpoint.publish`: the weights of a run become versions for inference, beside a run that never notices."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Container, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import eventually

from ckpt_component import CheckpointConfigError, build_manager
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.events import read_events
from ckpt_component.publishing import follow
from ckpt_component.publishing.versions import Version, Versions

QUICK = ["checkpoint.durability=process_crash", "checkpoint.save.every_steps=1"]


def trained(
    folder: Path, *overrides: str, steps: Sequence[int] = range(1, 5), awaited: Container[int] = (), fails: bool = False
) -> Any:
    """Train in `run`, and publish to `weights`; each weight is the step. Wait for the events of some steps."""
    model = torch.nn.Linear(200, 200)
    publish = [f"checkpoint.publish.to={folder / 'weights'}", *(f"checkpoint.{each}" for each in overrides)]
    with build_manager("async_persistent", [*QUICK, *publish], dir=folder / "run") as manager:
        manager.restore({"model": model})
        for step in steps:
            with torch.no_grad():
                model.weight.fill_(step)
            manager.maybe_save(step, {"model": model, "step": step})
            manager.wait()
            if step in awaited:
                eventually(partial(is_told, folder, step), 60)
        if fails:
            raise ZeroDivisionError
    return manager


def is_told(folder: Path, step: int) -> bool:
    return step in [event["step"] for event in events_of(folder)]


def versions_in(folder: Path) -> dict[int, Version]:
    return Versions(FileStorage(), str(folder / "weights")).look()


def events_of(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "run") if event["event"] == "publish"]


def weight_in(folder: Path) -> tuple[int | None, float]:
    """The step and the value of the newest published weights, as a receiver gets them."""
    newest = follow(folder / "weights", timeout=20)
    try:
        weights = next(newest)
        tensors = {name: tensor.clone() for name, tensor in weights.tensors()}
        assert tensors.keys() == {"weight", "bias"}
        assert (tensors["weight"] == tensors["weight"][0, 0]).all()
        return weights.step, tensors["weight"][0, 0].item()
    finally:
        newest.close()


def test_each_checkpoint_becomes_a_version_and_the_newest_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What gives way is counted, and no warning: who samples wants the newest weights."""
    trained(tmp_path, steps=range(1, 8))
    events, versions = events_of(tmp_path), versions_in(tmp_path)
    assert {event["outcome"] for event in events} == {"published"}
    assert [event["version"] for event in events] == [*versions] == [*range(1, len(events) + 1)]
    assert [event["step"] for event in events] == [version.step for version in versions.values()]
    assert events[-1]["step"] == 7 and len(events) + sum(event["skipped"] for event in events) == 7
    assert [event["whole"] for event in events] == [True] + [False] * (len(events) - 1)
    for event in events:
        assert event["bytes"] > 0 and event["whole_bytes"] >= 160_000 and event["lag"] >= 0 and event["seconds"] > 0
        assert os.path.basename(event["target"]) == f"weight_v{event['version']:06d}"
    assert weight_in(tmp_path) == (7, 7.0)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.slow
def test_every_second_checkpoint_and_the_last_one(tmp_path: Path) -> None:
    trained(tmp_path, "publish.every=2", "publish.delta=off", steps=range(1, 6), awaited=[2, 4])
    assert [event["step"] for event in events_of(tmp_path)] == [2, 4, 5]
    assert [version.is_whole for version in versions_in(tmp_path).values()] == [True] * 3


@pytest.mark.slow
def test_snapshots_in_memory_are_published_and_one_that_is_saved_too_counts_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    memory = ["recovery.mode=host", "recovery.every_steps=1", "save.every_steps=3"]
    trained(tmp_path, *memory, "publish.every=2", steps=range(1, 7), awaited=[2, 4, 6])
    assert [event["step"] for event in events_of(tmp_path)] == [2, 4, 6]
    assert [event["path"].startswith("host://") for event in events_of(tmp_path)][:2] == [True, True]
    assert weight_in(tmp_path) == (6, 6.0)
    assert not capfd.readouterr().err  # its processes end without a word


def test_numbers_and_changes_go_on_in_the_next_run(tmp_path: Path) -> None:
    trained(tmp_path, steps=[1, 2], awaited=[1])
    trained(tmp_path, steps=[3, 4], awaited=[3])
    versions = versions_in(tmp_path)
    assert [version.step for version in versions.values()] == [1, 2, 3, 4] and [*versions] == [1, 2, 3, 4]
    assert [version.is_whole for version in versions.values()] == [True, False, False, False]
    assert weight_in(tmp_path) == (4, 4.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "failpoint", "text"),
    [
        (["publish.prefix=modle"], None, "Did you mean 'model'?"),
        ([], "write:process=publish:nth=2:action=kill", "was killed by SIGKILL"),
        (
            ["publish.timeout=2"],
            "write:process=publish:from=1:action=sleep:60",
            "took longer than 2 s (checkpoint.publish.timeout)",
        ),
    ],
)
def test_a_failure_is_one_warning_and_the_run_goes_on(
    overrides: list[str],
    failpoint: str | None,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if failpoint is not None:
        monkeypatch.setenv("CKPT_FAILPOINT", failpoint)
        monkeypatch.setenv("CKPT_FAILPOINT_LOG", str(tmp_path / "log"))
    manager = trained(tmp_path, *overrides, steps=[1])
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert text in record.message and "the run continues" in record.message
    first, *rest = events_of(tmp_path)
    assert (
        first["outcome"] == "failed"
        and text in first["error"]
        and len(rest) == (failpoint is not None and "kill" in failpoint)
    )
    assert manager.steps() == [1] and {report.outcome for report in manager.reports} == {"committed"}
    if "kill" in (failpoint or ""):
        assert weight_in(tmp_path) == (1, 1.0), "the end of the run tries once more"
    else:
        assert versions_in(tmp_path) == {}


@pytest.mark.slow
def test_after_a_failure_the_next_checkpoint_is_published_whatever_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_FAILPOINT", "write:process=publish:nth=2:action=kill")
    monkeypatch.setenv("CKPT_FAILPOINT_LOG", str(tmp_path / "log"))
    trained(tmp_path, "publish.every=3", steps=range(1, 6), awaited=[3, 4])
    outcomes = [(event["step"], event["outcome"]) for event in events_of(tmp_path)]
    assert outcomes == [(3, "failed"), (4, "published"), (5, "published")]


def test_a_run_that_fails_gives_up_its_version_and_leaves_nothing_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_FAILPOINT", "write:process=publish:nth=2:action=sleep:60")
    monkeypatch.setenv("CKPT_FAILPOINT_LOG", str(tmp_path / "log"))
    with pytest.raises(ZeroDivisionError):
        trained(tmp_path, steps=[1], fails=True)
    assert versions_in(tmp_path) == {}
    monkeypatch.delenv("CKPT_FAILPOINT")
    trained(tmp_path, steps=[2])
    assert weight_in(tmp_path) == (2, 2.0)
    assert [name for name in os.listdir(tmp_path / "weights") if name.startswith((".ckpt-tmp", ".ckpt-trash"))] == []


def test_a_run_whose_folder_was_taken_over_publishes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    publish = [*QUICK, f"checkpoint.publish.to={tmp_path / 'weights'}"]
    state = {"model": torch.nn.Linear(2, 2)}
    with build_manager("async_persistent", [*publish, "checkpoint.publish.every=2"], dir=tmp_path / "run") as old:
        old.save(1, state)
        old.wait()
        with build_manager("async_persistent", ["checkpoint.takeover=true", *QUICK], dir=tmp_path / "run") as new:
            new.restore(state)
            new.save(2, state)
            new.wait()
    assert "publishing has stopped" in caplog.text and "took over" in caplog.text
    assert versions_in(tmp_path) == {}


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["publish.every=2"], "checkpoint.publish.every has no effect without a place for the versions"),
        (["publish.to=run"], "is the same folder as checkpoint.dir=run"),
        (["publish.to=run/iter_0000100"], "is in a checkpoint of checkpoint.dir=run"),
        (["publish.to=ftp://a/b"], "checkpoint.publish.to=ftp://a/b is no folder and no bucket"),
        (["publish.to=''"], "checkpoint.publish.to is empty"),
        (["publish.to=w", "publish.mirror=w"], "give the mirror one of its own"),
        (["publish.to=w", "publish.mirror=s3://b/m"], "is not a folder on a local disk"),
        (["publish.to=w", "commit=manifest"], "name a folder for it: checkpoint.publish.mirror="),
        (["publish.to=w", "publish.dtype=bfloat"], "Did you mean checkpoint.publish.dtype=bfloat16?"),
        (["publish.to=w", "publish.config_from=nowhere"], "has no config.json"),
        (["publish.to=w", "publish.rename=model"], "is not a dict of names"),
        (["publish.to=w", "publish.keep=0"], "must be at least 1"),
    ],
)
def test_a_wrong_setting_is_refused_before_training(
    overrides: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointConfigError) as error:
        build_manager("sync", ["checkpoint.dir=run", *(f"checkpoint.{each}" for each in overrides)])
    assert text in str(error.value)
    assert os.listdir(tmp_path) == []


def test_a_bucket_of_checkpoints_needs_a_mirror_on_a_local_disk() -> None:
    with pytest.raises(CheckpointConfigError, match=r"is a bucket; name a folder for it: checkpoint\.publish\.mirror="):
        build_manager("sync", ["checkpoint.publish.to=/w"], dir="s3://bucket/run")


def test_publishing_needs_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(CheckpointConfigError, match=r"checkpoint\.publish needs the package zstandard: pip install"):
        build_manager("sync", [f"checkpoint.publish.to={tmp_path / 'w'}"], dir=tmp_path / "run")


@pytest.mark.slow
def test_whole_versions_need_no_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    trained(tmp_path, "publish.delta=off", steps=range(1, 2), awaited=[1])
    assert weight_in(tmp_path) == (1, 1.0)
