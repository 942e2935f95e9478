"""`checkpoint.export`: committed checkpoints are also written for other programs, beside a run that never notices."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckpt_component import CheckpointConfigError, build_manager
from ckpt_component.events import read_events


def run(folder: Path, *overrides: str, steps: int = 4, fails: bool = False) -> Any:
    """Train; the weight is the step."""
    model = torch.nn.Linear(2, 2)
    settings = ["checkpoint.save.every_steps=1", "checkpoint.durability=process_crash", "checkpoint.keep.last=null"]
    with build_manager(
        "sync", [*settings, *(f"checkpoint.export.{each}" for each in overrides)], dir=folder
    ) as manager:
        for step in range(1, steps + 1):
            with torch.no_grad():
                model.weight.fill_(step)
            manager.save(step, {"model": model, "step": step})
            if fails:
                raise ZeroDivisionError
    return manager


@pytest.mark.slow
def test_exports_of_some_steps_and_the_last(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """While one runs, only the newest waits; so of many at once some are skipped, each by name."""
    run(tmp_path / "run", "format=hf", "dtype=bfloat16", "every_steps=2", "rename={weight:w}", steps=5)
    exports = tmp_path / "run" / "exports"
    done = {path.name: load_file(path / "model.safetensors") for path in exports.iterdir()}
    skipped = [f"iter_000000{step}" for step in (2, 4) if f"iter_000000{step} is not exported" in caplog.text]
    events = [event for event in read_events(tmp_path / "run") if event["event"] == "export"]
    assert [os.path.basename(event["target"]) for event in events] == sorted(done)
    assert {event["outcome"] for event in events} == {"exported"} and all(event["bytes"] > 0 for event in events)
    assert [event["step"] for event in events] == [int(name[-1]) for name in sorted(done)]
    assert len(caplog.records) == len(skipped) and not capfd.readouterr().err  # the process ends without a word
    assert sorted([*done, *skipped]) == ["iter_0000002", "iter_0000004", "iter_0000005"]
    assert "iter_0000005" in done
    for name, tensors in done.items():
        assert tensors.keys() == {"w", "bias"}
        assert tensors["w"].equal(torch.full((2, 2), int(name[-1]), dtype=torch.bfloat16))


def test_an_export_may_leave_out_more_keys_than_a_pipe_holds(tmp_path: Path) -> None:
    state = {"w": torch.zeros(2)} | {f"{'a_long_name' * 100}{number}": number for number in range(70)}
    overrides = [f"checkpoint.{each}" for each in ("export.format=hf", "export.timeout=20", "durability=process_crash")]
    with build_manager("sync", overrides, dir=tmp_path) as manager:
        manager.save(1, state)
    assert [event["outcome"] for event in read_events(tmp_path) if event["event"] == "export"] == ["exported"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "failpoint", "text"),
    [
        (["prefix=modle"], None, "Did you mean 'model'?"),
        ([], "write:process=export:nth=2:action=kill", "was killed by SIGKILL"),
        (
            ["timeout=1"],
            "write:process=export:nth=2:action=sleep:60",
            "took longer than 1 s (checkpoint.export.timeout)",
        ),
    ],
)
def test_a_failed_export_is_a_warning_and_leaves_nothing_visible(
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
    manager = run(tmp_path / "run", "format=hf", *overrides, steps=1)
    (record,) = [record for record in caplog.records if "was not exported" in record.message]
    assert record.levelno == logging.WARNING and text in record.message
    (event,) = [event for event in read_events(tmp_path / "run") if event["event"] == "export"]
    assert event["outcome"] == "failed" and text in event["error"]
    assert manager.steps() == [1] and [report.outcome for report in manager.reports] == ["committed"]
    exports = tmp_path / "run" / "exports"
    assert not exports.exists() or not [name for name in os.listdir(exports) if not name.startswith(".ckpt-tmp.")]


def test_a_run_that_fails_exports_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, "format=hf", fails=True)
    assert not (tmp_path / "exports").exists()


def test_a_run_that_fails_gives_up_the_export_that_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CKPT_FAILPOINT", "write:process=export:nth=2:action=sleep:60")
    monkeypatch.setenv("CKPT_FAILPOINT_LOG", str(tmp_path / "log"))
    overrides = [f"checkpoint.{each}" for each in ("save.every_steps=1", "export.format=hf", "export.every_steps=1")]
    with pytest.raises(ZeroDivisionError), build_manager("sync", overrides, dir=tmp_path / "run") as manager:
        manager.save(1, {"w": torch.zeros(2)})
        deadline = time.monotonic() + 20
        while not (tmp_path / "log").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        raise ZeroDivisionError
    assert "was not exported, and the run continues: the run has ended before its end" in caplog.text
    exports = tmp_path / "run" / "exports"
    assert not exports.exists() or not os.listdir(exports)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("export.dtype=bfloat", "Did you mean checkpoint.export.dtype=bfloat16?"),
        ("export.config_from=nowhere", "has no config.json"),
        ("export.rename=model", "is not a dict of names"),
        ("commit=manifest", "name a local folder, checkpoint.export.dir"),
        ("export.dir=run", "where checkpoints have the names of the exports"),
        ("export.dir=link/run", "where checkpoints have the names of the exports"),
        ("export.dir=link/run/iter_0000001", "is in a checkpoint of checkpoint.dir="),
    ],
)
def test_a_wrong_setting_is_refused_before_training(
    override: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(".")
    with pytest.raises(CheckpointConfigError) as error:
        build_manager("sync", ["checkpoint.export.format=hf", f"checkpoint.{override}"], dir=tmp_path / "run")
    assert text in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_is_kept_until_it_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the process is so slow that `keep` would have deleted it before it was opened."""
    monkeypatch.setenv("CKPT_FAILPOINT", "make_folder:process=export:nth=1:action=sleep:0.7")
    monkeypatch.setenv("CKPT_FAILPOINT_LOG", str(tmp_path / "log"))
    model, root = torch.nn.Linear(2, 2), tmp_path / "run"
    overrides = ["checkpoint.save.every_steps=1", "checkpoint.keep.last=1", "checkpoint.export.format=safetensors"]
    with build_manager("sync", [*overrides, "checkpoint.export.every_steps=1"], dir=root) as manager:
        manager.save(1, {"model": model})
        manager.wait()  # the listeners know of it
        manager.save(2, {"model": model})
        assert manager.steps() == [1, 2]
    assert sorted(os.listdir(root / "exports")) == ["iter_0000001.safetensors", "iter_0000002.safetensors"]
