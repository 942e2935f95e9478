"""A run begins with an older checkpoint, with one from elsewhere, or from scratch beside others: settled at the start."""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from owners import owned_by
from ranks import run_ranks

from ckpt_component import (
    CheckpointConfigError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointManager,
    CheckpointNotFoundError,
    CheckpointSaveError,
    CheckpointStageError,
    CheckpointStepError,
    build_checkpointer,
    build_manager,
)
from ckpt_component.events import read_events

POINTER = "latest_checkpointed_iteration.txt"
RESTORES_ONLY = ("checkpoint.save.every_steps=null", "checkpoint.save.at_end=false")
REWIND = "checkpoint.rewind=true"


def manager_in(root: Path, *overrides: str, preset: str = "sync") -> CheckpointManager:
    usual = ["checkpoint.save.every_steps=1", "checkpoint.save.at_end=false", "checkpoint.keep.last=null"]
    return build_manager(preset, [*usual, *overrides], dir=root)


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((100,), float(step)), "step": step}


def saved(root: Path, *steps: int, naming: str = "megatron") -> Path:
    with manager_in(root, f"checkpoint.naming={naming}") as manager:
        for step in steps:
            manager.save(step, state_of(step))
    return root


def restored(root: Path, *overrides: str) -> int | None:
    state = state_of(0)
    with manager_in(root, *overrides) as manager:
        step = manager.restore(state)
    assert step is None or state["weight"].eq(state["step"]).all()
    return step


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.startswith((".", "events")))


def retired(root: Path) -> list[str]:
    return sorted(path.name.split(".")[2] for path in root.glob(".ckpt-quarantine.*"))


def stock_dcp(path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({**state_of(5)}, checkpoint_id=path)


@pytest.fixture
def another_run(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A living process of this host."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.communicate(b"\n")


# --- an older step --------------------------------------------------------------------------------------------------


def test_an_older_step_is_refused_at_restore_with_the_ways_out(tmp_path: Path) -> None:
    saved(tmp_path, 3, 6, 9, 12)
    with pytest.raises(CheckpointExistsError) as caught:
        restored(tmp_path, "checkpoint.resume=6")
    text = str(caught.value)
    assert f"checkpoint.resume=6, and in {tmp_path} steps 9, 12 would follow step 6" in text
    for typed in (REWIND, f"checkpoint.resume={tmp_path}/iter_0000006 checkpoint.dir=", "checkpoint.resume=auto"):
        assert typed in text
    assert names(tmp_path) == [*(f"iter_{step:07d}" for step in (3, 6, 9, 12)), POINTER]
    # What the text says, typed.
    assert restored(tmp_path, "checkpoint.resume=6", *RESTORES_ONLY) == 6
    assert restored(tmp_path / "new", f"checkpoint.resume={tmp_path}/iter_0000006") == 6
    assert restored(tmp_path) == 12
    assert restored(tmp_path, "checkpoint.resume=12") == 12


def test_what_to_type_for_a_path_with_special_characters_works(tmp_path: Path) -> None:
    root = saved(tmp_path / 'lr=0.1, "a b"', 1, 2)
    with pytest.raises(CheckpointExistsError) as caught:
        restored(root, "checkpoint.resume=1")
    typed = str(caught.value).partition("type ")[2].partition(" checkpoint.dir=")[0]
    assert restored(tmp_path / "new", *shlex.split(typed)) == 1


@pytest.mark.parametrize("counter", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_a_restarted_job_does_not_retire_what_may_be_its_own(
    counter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(counter, "0")
    saved(tmp_path, 6, 9)
    assert restored(tmp_path, "checkpoint.resume=6", REWIND) == 6
    saved(tmp_path, 7)
    monkeypatch.setenv(counter, "1")
    with pytest.raises(CheckpointExistsError, match=f"restarted .{counter}=1., because 7 in .* may be its own"):
        restored(tmp_path, "checkpoint.resume=6", REWIND)
    assert retired(tmp_path) == ["iter_0000009"] and restored(tmp_path) == 7


@pytest.mark.parametrize("commit", ["rename", "manifest"])
def test_rewind_without_renames_keeps_the_data_where_it_is_and_in_nobodys_way(commit: str, tmp_path: Path) -> None:
    manifest = "checkpoint.commit=manifest"
    with manager_in(tmp_path, f"checkpoint.commit={commit}") as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
    assert restored(tmp_path, manifest, "checkpoint.resume=1", REWIND) == 1
    with manager_in(tmp_path, manifest, "checkpoint.resume=1") as manager:
        assert manager.restore(state_of(0)) == 1
        assert manager.steps() == [1]
        manager.save(2, state_of(7))
    assert restored(tmp_path, manifest) == 2
    assert len(list((tmp_path / "iter_0000002").rglob("quarantined.json"))) == 1


def test_a_damaged_step_that_follows_is_in_the_way_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ckpt_component")
    saved(tmp_path, 1, 2)
    (tmp_path / "iter_0000002" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointExistsError, match="step 2 would follow step 1"):
        restored(tmp_path, "checkpoint.resume=1")
    assert restored(tmp_path, "checkpoint.resume=1", REWIND) == 1
    assert retired(tmp_path) == ["iter_0000002"]
    assert "retired step 2 (checkpoint.rewind=true): kept as" in caplog.text
    (event,) = (event for event in read_events(tmp_path) if event["event"] == "retire")
    assert event["step"] == 2 and event["path"] in caplog.text


def test_nothing_is_retired_when_the_chosen_step_does_not_load(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    for resume in ("checkpoint.resume=1", f"checkpoint.resume={tmp_path}/iter_0000001"):
        with manager_in(tmp_path, resume, REWIND) as manager, pytest.raises(CheckpointError, match="has shape"):
            manager.restore({"weight": torch.zeros(7), "step": 0})
    assert retired(tmp_path) == [] and manager.steps() == [1, 2]


# --- from scratch ---------------------------------------------------------------------------------------------------


def test_from_scratch_beside_checkpoints_is_refused_or_retires_them_all(tmp_path: Path) -> None:
    saved(tmp_path, 900, 1000)
    with pytest.raises(CheckpointExistsError, match="holds checkpoints of steps 900, 1000.*resume=auto.*rewind=true"):
        restored(tmp_path, "checkpoint.resume=never")
    assert restored(tmp_path, "checkpoint.resume=never", *RESTORES_ONLY) is None
    with manager_in(tmp_path, "checkpoint.resume=never", REWIND) as manager:
        assert manager.restore(state_of(0)) is None
        assert names(tmp_path) == []  # and no pointer to what is no more
        manager.save(1, state_of(1))
    assert manager.steps() == [1] and retired(tmp_path) == ["iter_0000900", "iter_0001000"]


@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_a_script_that_never_restores_is_refused_at_its_first_save(preset: str, tmp_path: Path) -> None:
    """`keep` would delete each of its checkpoints at once, as the oldest."""
    saved(tmp_path, 900, 1000)
    with manager_in(tmp_path, preset=preset) as manager:
        with pytest.raises(CheckpointExistsError, match=r"Step 10 is the first .* steps 900, 1000\. .*restore\(\)"):
            manager.save(10, state_of(10))
        assert manager.save(1010, state_of(1010))
    with manager_in(tmp_path, REWIND, preset=preset) as manager:
        manager.save(950, state_of(950))
        manager.wait()
        assert manager.steps() == [900, 950]
    never = manager_in(tmp_path, "checkpoint.resume=never", preset=preset)
    with never as manager, pytest.raises(CheckpointExistsError, match="checkpoint.resume=never"):
        manager.save(2000, state_of(2000))
    with manager_in(tmp_path / "new", "checkpoint.resume=never", preset=preset) as manager:
        assert manager.save(1, state_of(1)) and manager.save(2, state_of(2))  # its own are not in the way


def test_an_evaluation_that_saves_after_all_is_settled_at_that_save(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    with manager_in(tmp_path, "checkpoint.resume=1", *RESTORES_ONLY) as manager:
        assert manager.restore(state_of(0)) == 1
        with pytest.raises(CheckpointExistsError, match="Step 2 is the first that this run saves"):
            manager.save(2, state_of(2))


# --- from elsewhere -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "step"),
    [("iter_0000007", 7), ("step_00000007", 7), ("step_7", 7), ("global_step7", 7), ("checkpoint-7", 7), ("best", 0)],
)
def test_a_path_is_loaded_and_its_step_is_that_of_its_name(
    name: str, step: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with build_checkpointer("sync") as ours:
        ours.save(state_of(7), tmp_path / "old" / name)
    state = state_of(0)
    with manager_in(tmp_path / "new", f"checkpoint.resume={tmp_path}/old/{name}") as manager:
        assert manager.restore(state) == step
        assert state["step"] == 7 and state["weight"].eq(7).all()
        assert manager.save(step, state)  # it is not in this folder yet
        assert manager.steps() == [step]
    assert ("has no step in its name" in caplog.text) == (name == "best")


def test_paths_of_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "old", 6)
    (tmp_path / "iter_0000006").symlink_to(tmp_path / "old" / "iter_0000006")
    torch.save(state_of(4), tmp_path / "step_4.pt")
    stock_dcp(tmp_path / "dcp" / "step_5")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for number, (path, step) in enumerate(
        [
            ("old/iter_0000006", 6),
            ("iter_0000006", 6),
            ("./iter_0000006", 6),
            ("'~/old/iter_0000006'", 6),
            ("step_4.pt", 4),
            ("dcp/step_5", 5),
        ]
    ):
        assert restored(tmp_path / f"new{number}", f"checkpoint.resume={path}") == step, path
    with build_manager({**_plain("sync"), "resume": Path("old/iter_0000006")}, dir=tmp_path / "new") as manager:
        assert manager.restore(state_of(0)) == 6


def _plain(preset: str) -> dict[str, Any]:
    from omegaconf import OmegaConf

    from ckpt_component import compose_checkpoint

    return OmegaConf.to_container(compose_checkpoint(preset, []), resolve=True)  # type: ignore[return-value]


def test_a_path_into_the_runs_own_folder_is_that_step(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    with pytest.raises(CheckpointExistsError, match="step 2 would follow step 1"):
        restored(tmp_path, f"checkpoint.resume={tmp_path}/iter_0000001")
    with manager_in(tmp_path, f"checkpoint.resume={tmp_path}/iter_0000002") as manager:
        assert manager.restore(state_of(0)) == 2
        assert manager.save(2, state_of(2)) is False  # saved already
    (tmp_path / "link").symlink_to(tmp_path)
    with manager_in(tmp_path, f"checkpoint.resume={tmp_path}/link/iter_0000002") as manager:
        assert manager.restore(state_of(0)) == 2
        assert manager.save(2, state_of(2)) is False
        assert manager.restored_from == f"{tmp_path}/iter_0000002"
        manager.save(3, state_of(3))
    record = json.loads((tmp_path / "iter_0000003" / "manifest.json").read_text())["manifest"]
    assert record["resumed_from"] == "iter_0000002"


@pytest.mark.slow
def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path / "old", 1, 2)
    new = tmp_path / "new"
    with pytest.raises(CheckpointNotFoundError, match="does not exist; name the folder"):
        restored(new, f"checkpoint.resume={tmp_path}/nothing")
    with pytest.raises(CheckpointNotFoundError, match=f"such as checkpoint.resume={tmp_path}/old/iter_0000002"):
        restored(new, f"checkpoint.resume={tmp_path}/old")
    with pytest.raises(CheckpointConfigError, match="is not in a bucket"):
        restored(new, 'checkpoint.resume="ftp://bucket/iter_1"')
    with pytest.raises(CheckpointConfigError, match="a step or a path, got olds"):
        restored(new, "checkpoint.resume=olds")


# --- checkpoints of others ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "now"), [("megatron", "step"), ("step", "megatron")])
def test_another_naming_is_not_begun_beside_the_old_one(
    before: str, now: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 3, 15, naming=before)
    newest = {"megatron": "iter_0000015", "step": "step_00000015"}[before]
    for resume in ("auto", "must"):
        with pytest.raises(CheckpointNotFoundError, match=f"the newest {newest}.*type checkpoint.naming={before};"):
            restored(tmp_path, f"checkpoint.naming={now}", f"checkpoint.resume={resume}")
    with pytest.raises(CheckpointNotFoundError, match=f"with checkpoint.naming={before} it is there"):
        restored(tmp_path, f"checkpoint.naming={now}", "checkpoint.resume=3")
    assert restored(tmp_path, f"checkpoint.naming={before}") == 15
    with manager_in(tmp_path, f"checkpoint.naming={now}", "checkpoint.resume=never") as manager:
        assert manager.restore(state_of(0)) is None
        manager.save(1, state_of(1))
    assert restored(tmp_path, f"checkpoint.naming={now}") == 1
    assert caplog.text.count(f"also holds checkpoints up to step 15 of checkpoint.naming={before}") == 1


@pytest.mark.parametrize("name", ["step_5", "iter_0000005", "checkpoint-5"])
def test_a_stock_dcp_checkpoint_is_not_passed_over(name: str, tmp_path: Path) -> None:
    stock_dcp(tmp_path / name)
    with pytest.raises(CheckpointNotFoundError) as caught:
        restored(tmp_path)
    assert f"type checkpoint.resume={tmp_path}/{name};" in str(caught.value)
    # Where it has a name of ours, it would be in the way of a run from scratch.
    assert ("checkpoint.resume=never" in str(caught.value)) == (name != "iter_0000005")
    assert restored(tmp_path / "new", f"checkpoint.resume={tmp_path}/{name}") == 5
    assert restored(tmp_path, "checkpoint.resume=never") is None


def test_megatrons_own_checkpoints_are_not_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / POINTER).write_text("5")
    assert restored(tmp_path) is None
    assert f"{POINTER} in {tmp_path} names step 5, but there is no such checkpoint" in caplog.text
    (tmp_path / "iter_0000005" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(
        CheckpointNotFoundError, match=r"iter_0000005\. Its format is not read here; .* checkpoint\.dir\.$"
    ):
        restored(tmp_path)


def test_the_folder_that_is_a_checkpoint_itself_is_no_folder_of_checkpoints(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    with pytest.raises(CheckpointNotFoundError, match="is a checkpoint itself.*with another checkpoint.dir"):
        restored(tmp_path / "iter_0000001")


def test_a_checkpoint_without_a_step_in_its_name_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save(state_of(1), tmp_path / "pretrained.pt")
    (tmp_path / "logs").mkdir()
    assert restored(tmp_path) is None
    assert f"to load it, type checkpoint.resume={tmp_path}/pretrained.pt" in caplog.text and "logs" not in caplog.text


# --- what restore says ----------------------------------------------------------------------------------------------


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    caplog.clear()
    return [line for line in lines if "restored" in line or "scratch" in line]


def test_restore_says_what_it_loaded_or_why_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ckpt_component")
    restored(tmp_path)
    assert said(caplog) == [f"no checkpoint in {tmp_path}: starting from scratch"]
    restored(tmp_path, "checkpoint.resume=never")
    assert said(caplog) == ["checkpoint.resume=never: starting from scratch"]
    with build_manager("off", dir=tmp_path) as manager:
        manager.restore(state_of(0))
    assert said(caplog) == ["checkpoint.enabled=false: nothing is restored"]
    saved(tmp_path, 3)
    size = sum(path.stat().st_size for path in (tmp_path / "iter_0000003").iterdir() if path.name != "manifest.json")
    for verify, text in (("on_resume", "checksums verified"), ("off", "not verified (checkpoint.verify=off)")):
        restored(tmp_path, f"checkpoint.verify={verify}")
        (line,) = said(caplog)
        assert line.startswith(f"restored step 3 from {tmp_path}/iter_0000003: {size} bytes in ")
        assert line.endswith(f" s, {text}")
    stock_dcp(tmp_path / "step_5")
    restored(tmp_path / "new", f"checkpoint.resume={tmp_path}/step_5")
    (line,) = said(caplog)
    assert "restored step 5" in line and line.endswith("not verified: it has no checksums")


# --- the first save -------------------------------------------------------------------------------------------------


def test_a_resumed_run_has_its_memory_before_the_first_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 1)
    caplog.set_level(logging.DEBUG, "ckpt_component")
    with manager_in(tmp_path, preset="async_persistent") as manager:
        manager.restore(state_of(0))
        assert caplog.text.count("planned 1 tensors and 1 objects") == 1
        manager.save(2, state_of(2))
        manager.wait()
        assert caplog.text.count("planned") == 1
        assert [record.levelname for record in caplog.records if "planned" in record.message] == ["DEBUG"]
    caplog.clear()
    with manager_in(tmp_path, *RESTORES_ONLY, preset="async_persistent") as manager:
        manager.restore(state_of(0))
    assert "planned" not in caplog.text


@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_a_state_that_cannot_be_saved_is_refused_when_it_is_restored(
    preset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 1)
    bad = {**state_of(0), "bad": Path("somewhere")}
    with manager_in(tmp_path, preset=preset) as manager, pytest.raises(CheckpointStageError, match="bad"):
        manager.restore(bad, strict=False)
    with manager_in(tmp_path, "checkpoint.on_error=warn", preset=preset) as manager:
        assert manager.restore(bad, strict=False) == 1
    assert "the first save will fail (checkpoint.on_error=warn): " in caplog.text


# --- steps that are none --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [-1, "2", 2.0, None, True], ids=repr)
def test_what_is_no_step_is_refused(step: Any, tmp_path: Path) -> None:
    with manager_in(tmp_path) as manager:
        for call in (manager.save, manager.maybe_save):
            with pytest.raises(CheckpointStepError, match="^The step is ") as caught:
                call(step, state_of(1))
            assert isinstance(caught.value, TypeError) and isinstance(caught.value, ValueError)
        with pytest.raises(CheckpointStepError):
            manager.path_of(step)
        assert manager.steps() == [] and manager.reports == []


def test_whole_numbers_of_others_and_the_largest_one_are_steps(tmp_path: Path) -> None:
    class Whole:
        def __index__(self) -> int:
            return 3

    with manager_in(tmp_path) as manager:
        manager.save(Whole(), state_of(3))  # type: ignore[arg-type]
        manager.save(torch.tensor(4), state_of(4))  # type: ignore[arg-type]
        manager.save(10**18 - 1, state_of(5))
        with pytest.raises(CheckpointStepError, match="steps go from 0 to"):
            manager.save(10**18, state_of(5))
        assert manager.steps() == [3, 4, 10**18 - 1] and type(manager.reports[0].step) is int
    assert restored(tmp_path) == 10**18 - 1


# --- other runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False], ids=["first_save", "later_save"])
def test_a_second_live_run_is_told_who_is_there(
    first: bool, tmp_path: Path, another_run: subprocess.Popen[bytes]
) -> None:
    with manager_in(tmp_path) as manager:
        if not first:
            manager.save(1, state_of(1))
        saved(tmp_path, 2, 3)
        owned_by(tmp_path, another_run.pid)
        with pytest.raises(CheckpointExistsError) as caught:
            manager.save(2, state_of(2))
    assert str(caught.value).startswith(f"Another run saves to {tmp_path}: process {another_run.pid} on ")
    assert "still runs. End one of the two, or give each a checkpoint.dir of its own." in str(caught.value)


def test_an_owner_on_another_host_may_run_and_one_that_ended_does_not(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    for host, text in (
        ("elsewhere", "^Another run saves to .* on elsewhere since .* may still run"),
        (None, "^Step 1 is the first that this run saves"),
    ):
        owned_by(tmp_path, _ended_pid(), **({} if host is None else {"host": host}))
        with manager_in(tmp_path) as manager, pytest.raises(CheckpointExistsError, match=text):
            manager.save(1, state_of(1))


def _ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_rewind_retires_nothing_of_a_run_that_is_alive(tmp_path: Path, another_run: subprocess.Popen[bytes]) -> None:
    saved(tmp_path, 1, 2)
    with manager_in(tmp_path, "checkpoint.resume=1", REWIND) as manager:
        owned_by(tmp_path, another_run.pid)  # it began to save after this one was built
        with pytest.raises(CheckpointSaveError, match=f"process {another_run.pid} on .* still runs. End it first"):
            manager.restore(state_of(0))
    assert retired(tmp_path) == []
    owned_by(tmp_path, _ended_pid())
    assert restored(tmp_path, "checkpoint.resume=1", REWIND) == 1
    assert json.loads((tmp_path / ".ckpt-owner.json").read_text())["pid"] == os.getpid()  # what follows is fenced off


def test_a_takeover_is_of_both_folders(tmp_path: Path, another_run: subprocess.Popen[bytes]) -> None:
    slow = saved(tmp_path / "slow", 1, 2)
    owned_by(slow, another_run.pid)
    back = ["checkpoint.resume=1", REWIND, f"checkpoint.local.dir={tmp_path / 'fast'}", *RESTORES_ONLY]
    with pytest.raises(CheckpointSaveError, match=f"would retire 2 in {slow}, .* still runs. End it first"):
        restored(slow, *back)
    assert restored(slow, *back, "checkpoint.takeover=true") == 1 and retired(slow) == ["iter_0000002"]


@pytest.mark.parametrize(("which", "level"), [("ended", "DEBUG"), ("elsewhere", "INFO"), ("alive", "WARNING")])
def test_taking_over_is_as_loud_as_the_last_owner_may_be_alive(
    which: str, level: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, another_run: subprocess.Popen[bytes]
) -> None:
    saved(tmp_path, 1)
    owned_by(
        tmp_path,
        another_run.pid if which == "alive" else _ended_pid(),
        **({"host": "host"} if which == "elsewhere" else {}),
    )
    caplog.set_level(logging.DEBUG, "ckpt_component")
    with manager_in(tmp_path, "checkpoint.takeover=true") as manager:
        assert manager.restore(state_of(0)) == 1
        manager.save(2, state_of(2))
    (record,) = [record for record in caplog.records if "took ownership of" in record.getMessage()]
    assert record.levelname == level and ("still running" in record.getMessage()) == (which == "alive")


# --- several ranks --------------------------------------------------------------------------------------------------


@pytest.mark.turns(3)
@pytest.mark.slow
def test_two_ranks_decide_together(tmp_path: Path) -> None:
    run_ranks(Path(__file__).parent / "scripts" / "going_back.py", "together", 2, tmp_path)
