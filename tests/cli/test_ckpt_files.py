"""`ckpt cp`, `mv`, `rm` and `gc` as a user meets them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from owners import owned_by
from safetensors.torch import save_file

from ckpt_component import build_checkpointer, build_manager
from ckpt_component.cli.app import main
from ckpt_component.core.commit.commit import new_attempt
from ckpt_component.core.commit.liveness import AttemptLock
from ckpt_component.core.commit.manifest import read_manifest
from ckpt_component.core.commit.names import MEGATRON, STEP
from ckpt_component.core.commit.scan import read_pointer, scan_steps
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.formats.verification import verify_checkpoint

Ckpt = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ckpt(capsys: pytest.CaptureFixture[str]) -> Ckpt:
    """Run the command; gives exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as leaving:
            main([*map(str, arguments)])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return int(leaving.value.code or 0), out, err

    return run


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((40, 4), float(step)), "bias": torch.ones(3), "step": step}


def save(root: Path, *steps: int, overrides: tuple[str, ...] = ()) -> Path:
    usual = ("checkpoint.save.at_end=false", "checkpoint.keep.last=null")
    with build_manager("sync", [*usual, *overrides], dir=root) as manager:
        for step in steps:
            manager.save(step, state_of(step), metrics={"loss": 1 / step})
    return root


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("saved"), 1, 2, 3)


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    """Steps 1, 2 and 3 of a run that has ended."""
    return Path(shutil.copytree(saved, tmp_path / "root"))


def steps(root: Path, names: Any = MEGATRON) -> list[int]:
    return scan_steps(FileStorage(), str(root), names).committed


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


# --- cp and mv ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("new", "new"),
        ("there", "there/iter_0000002"),
        ("fresh/", "fresh/iter_0000002"),
        ("other@300", "other/iter_0000300"),
        ("there/best", "there/best"),
        ("there/step_00000005", "there/step_00000005"),
    ],
)
def test_a_copy_lands_where_it_should_and_can_be_repeated(
    target: str, path: str, root: Path, tmp_path: Path, ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    code, out, _ = ckpt("cp", "root@2", target)
    assert code == 0 and f"to {path}: " in out and "verified" in out
    copy, source = tmp_path / path, root / MEGATRON.folder(2)
    assert content(copy) == content(source)
    old, new = (read_manifest(FileStorage(), str(folder)) for folder in (source, copy))
    assert old is not None and new is not None and old["created"] == new["created"] and old["attempt"] != new["attempt"]
    with build_checkpointer("sync") as checkpointer:
        assert checkpointer.load(str(copy))["step"] == 2
    code, out, _ = ckpt("cp", "root@2", target)
    assert code == 0 and "it was there already" in out
    assert sorted(os.listdir(copy)) == sorted(os.listdir(source))
    code, _, err = ckpt("cp", "root@3", copy)
    assert code == 2 and "exists and is no copy of" in err
    assert not [name for name in os.listdir(copy.parent) if name.startswith(".ckpt-")]


def test_a_copy_into_a_root_has_its_naming_and_moves_the_pointer(root: Path, tmp_path: Path, ckpt: Ckpt) -> None:
    other = save(tmp_path / "other", 1, overrides=("checkpoint.naming=step",))
    assert ckpt("cp", f"{root}@3", other)[0] == 0
    assert steps(other, STEP) == [1, 3] and read_pointer(FileStorage(), str(other), STEP) == 3


def test_no_checkpoint_is_put_inside_of_another(root: Path, tmp_path: Path, ckpt: Ckpt) -> None:
    assert ckpt("cp", f"{root}@2", tmp_path / "other")[0] == 0
    there = sorted(os.listdir(tmp_path / "other"))
    for command in ("cp", "mv"):
        for target in (f"{tmp_path}/other@7", f"{tmp_path}/other/", tmp_path / "other/best"):
            code, _, err = ckpt(command, f"{root}@3", target)
            assert code == 2 and "other is a checkpoint itself" in err
    assert steps(root) == [1, 2, 3] and sorted(os.listdir(tmp_path / "other")) == there


def test_a_damaged_checkpoint_is_not_copied(root: Path, tmp_path: Path, ckpt: Ckpt) -> None:
    data = root / MEGATRON.folder(2) / "__0_0.distcp"
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    data.write_bytes(damaged)
    code, _, err = ckpt("cp", f"{root}@2", tmp_path / "copy")
    assert code == 2 and "or its copy, is damaged" in err and os.listdir(tmp_path) == ["root"]


def test_dry_runs_change_nothing(root: Path, tmp_path: Path, ckpt: Ckpt) -> None:
    before = sorted(tmp_path.rglob("*"))
    for arguments in (
        ("cp", f"{root}@2", tmp_path / "x/y"),
        ("mv", f"{root}@2", tmp_path / "x/y"),
        ("rm", f"{root}@2"),
        ("gc", root, "--keep-last", 1),
    ):
        code, out, _ = ckpt(*arguments, "--dry-run")
        assert code == 0 and "would" in out
        code, out, _ = ckpt(*arguments, "--dry-run", "--json")
        assert code == 0 and json.loads(out)["dry_run"] is True
    assert sorted(tmp_path.rglob("*")) == before


def test_a_move_is_a_rename_and_the_pointers_follow(root: Path, tmp_path: Path, ckpt: Ckpt) -> None:
    node = (root / MEGATRON.folder(3)).stat().st_ino
    code, out, _ = ckpt("mv", f"{root}@3", f"{tmp_path}/other@7")
    assert code == 0 and "renamed" in out
    assert (tmp_path / "other" / MEGATRON.folder(7)).stat().st_ino == node
    assert steps(root) == [1, 2] and read_pointer(FileStorage(), str(root), MEGATRON) == 2
    assert read_pointer(FileStorage(), str(tmp_path / "other"), MEGATRON) == 7
    code, _, err = ckpt("mv", f"{root}@3", f"{tmp_path}/other@7")
    assert code == 2 and "has no checkpoint of step 3" in err


def test_a_move_to_another_file_system_ends_after_it_was_cut_off(root: Path, ckpt: Ckpt) -> None:
    other = Path("/dev/shm/test_ckpt_files")
    source = root / MEGATRON.folder(3)
    try:
        assert ckpt("cp", source, f"{other}/")[0] == 0  # as far as a move came that was killed before its end
        code, out, _ = ckpt("mv", source, f"{other}/")
        assert code == 0 and "verified; it was there already" in out
        code, out, _ = ckpt("mv", other / source.name, root)
        assert code == 0 and "verified" in out and steps(root) == [1, 2, 3]
        assert verify_checkpoint(FileStorage(), str(source)) and os.listdir(other) == []
    finally:
        shutil.rmtree(other, ignore_errors=True)


def test_checkpoints_of_other_programs_are_left_to_other_commands(tmp_path: Path, ckpt: Ckpt) -> None:
    source = tmp_path / "checkpoint-5"
    source.mkdir()
    save_file({"weight": torch.ones(9)}, str(source / "model.safetensors"))
    for command in ("cp", "mv"):
        for path in (source, source / "model.safetensors"):
            code, _, err = ckpt(command, path, tmp_path / "copy")
            assert code == 2 and "use cp or mv, or ckpt import" in err and os.listdir(tmp_path) == ["checkpoint-5"]


def test_without_renames_a_copy_is_committed_by_its_manifest(root: Path, tmp_path: Path, ckpt: Ckpt) -> None:
    assert ckpt("cp", f"{root}@2", f"{tmp_path}/bucket@2", "--commit", "manifest")[0] == 0
    target = tmp_path / "bucket" / MEGATRON.folder(2)
    manifest = read_manifest(FileStorage(), str(target))
    assert manifest is not None and "at" in manifest and verify_checkpoint(FileStorage(), str(target))
    assert ckpt("cp", f"{root}@3", tmp_path / "bucket")[0] == 0  # as the other one there
    manifest = read_manifest(FileStorage(), str(tmp_path / "bucket" / MEGATRON.folder(3)))
    assert manifest is not None and "at" in manifest
    assert ckpt("mv", f"{tmp_path}/bucket@3", root / "iter_0000009")[0] == 0
    assert steps(root) == [1, 2, 3, 9] and steps(tmp_path / "bucket") == [2]
    assert ckpt("rm", f"{tmp_path}/bucket@2", "--force")[0] == 0 and steps(tmp_path / "bucket") == []


# --- whose it is ----------------------------------------------------------------------------------------------------


def test_a_run_that_is_alive_keeps_its_checkpoints(root: Path, tmp_path: Path, ckpt: Ckpt) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        owned_by(root, sleeper.pid)
        for arguments in (
            ("rm", f"{root}@1", "--ended"),
            ("mv", f"{root}@1", tmp_path / "x"),
            ("cp", f"{root}@1", f"{root}@9"),
            ("gc", root, "--keep-last", 1),
        ):
            code, _, err = ckpt(*arguments)
            assert code == 2 and f"process {sleeper.pid}" in err and "end it first" in err
        assert ckpt("cp", f"{root}@1", root / "best")[0] == 0  # a name that no run uses
        assert ckpt("rm", root / "best")[0] == 0
    finally:
        sleeper.communicate(b"\n", timeout=20)
    assert ckpt("rm", f"{root}@1")[0] == 0 and steps(root) == [2, 3]


def test_a_run_on_another_host_is_taken_as_alive_until_the_user_says_that_it_has_ended(root: Path, ckpt: Ckpt) -> None:
    owned_by(root, 1, host="elsewhere")
    code, _, err = ckpt("rm", f"{root}@1")
    assert code == 2 and "if it has ended, type --ended" in err
    assert ckpt("rm", f"{root}@1", "--ended")[0] == 0


# --- rm -------------------------------------------------------------------------------------------------------------


def test_the_last_good_one_stays_and_all_are_checked_first(root: Path, ckpt: Ckpt) -> None:
    (root / MEGATRON.folder(3) / "__0_0.distcp").unlink()  # damaged
    code, _, err = ckpt("rm", f"{root}@1", f"{root}@2")
    assert code == 2 and "would have no good checkpoint left" in err and steps(root) == [1, 2]
    code, _, err = ckpt("rm", f"{root}@1", f"{root}@9")
    assert code == 2 and "has no checkpoint of step 9" in err and steps(root) == [1, 2]
    code, out, _ = ckpt("rm", f"{root}@1", f"{root}@3", "--json")
    assert code == 0 and [Path(each["path"]).name for each in json.loads(out)["deleted"]] == [
        MEGATRON.folder(1),
        MEGATRON.folder(3),
    ]
    assert read_pointer(FileStorage(), str(root), MEGATRON) == 2
    assert ckpt("rm", f"{root}@2", "--force")[0] == 0
    assert steps(root) == [] and not (root / MEGATRON.pointer).exists()


def test_what_is_no_checkpoint_of_ours_is_not_deleted(root: Path, tmp_path: Path, ckpt: Ckpt) -> None:
    (tmp_path / "empty").mkdir()
    for command in (("cp", tmp_path / "empty", "x"), ("mv", tmp_path / "empty", "x"), ("rm", tmp_path / "empty")):
        assert ckpt(*command)[0] == 2 and (tmp_path / "empty").exists()
    code, _, err = ckpt("rm", root)
    assert code == 2 and "is a folder of checkpoints; name those to delete" in err
    (tmp_path / "other").mkdir()
    save_file({"weight": torch.ones(9)}, str(tmp_path / "other/model.safetensors"))
    code, _, err = ckpt("rm", tmp_path / "other")
    assert code == 2 and "has no manifest.json" in err and (tmp_path / "other/model.safetensors").exists()


# --- gc -------------------------------------------------------------------------------------------------------------


def test_debris_of_the_dead_goes_and_that_of_the_living_stays(root: Path, ckpt: Ckpt) -> None:
    fs = FileStorage()
    dead, alive, young = (new_attempt(fs, str(root / MEGATRON.folder(step)), new_token()) for step in (7, 8, 9))
    for attempt in (dead, alive, young):
        fs.make_folder(attempt.staging)
        fs.write_new(os.path.join(attempt.staging, "data"), b"1234")
    for attempt in (dead, alive):
        os.utime(attempt.staging, (1, 1))
    kept = root / ".ckpt-quarantine.iter_0000001.x"
    kept.mkdir()
    lock = AttemptLock(fs, alive)
    try:
        code, out, _ = ckpt("gc", root)
    finally:
        lock.close()
    assert code == 0 and os.path.basename(dead.staging) in out and "deleted: 4 bytes" in out
    for attempt in (alive, young):
        assert f"kept {os.path.basename(attempt.staging)}: a process works on it" in out
    assert [os.path.exists(attempt.staging) for attempt in (dead, alive, young)] == [False, True, True]
    assert kept.exists() and steps(root) == [1, 2, 3]
    assert ckpt("rm", kept)[0] == 0 and not kept.exists()


def test_old_ones_go_but_not_those_that_the_run_keeps_for_good(tmp_path: Path, ckpt: Ckpt) -> None:
    keep = ("checkpoint.keep.every_steps=2", "checkpoint.keep.best.metric=loss", "checkpoint.keep.best.mode=max")
    root = save(tmp_path / "root", 1, 2, 3, 4, 5, overrides=keep)
    assert ckpt("gc", root, "--keep-last", 0)[0] == 2
    assert ckpt("gc", root, "--keep-last", 1)[0] == 0
    assert steps(root) == [1, 2, 4, 5]  # the best, multiples of 2, and the newest


def test_debris_of_another_host_goes_once_its_run_has_ended(root: Path, ckpt: Ckpt) -> None:
    dead = root / f".ckpt-tmp.iter_0000009.{'0' * 8}-{'1' * 8}-o"
    dead.mkdir()
    os.utime(dead, (1, 1))
    said = ckpt("gc", root)[1]
    assert "nothing to delete" in said and f"kept {dead.name}: left on another host: --ended" in said and dead.exists()
    assert ckpt("gc", root, "--ended")[0] == 0 and not dead.exists()


def test_the_commands_start_without_torch() -> None:
    code = "import sys; from ckpt_component.cli import change_commands, verify_command"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True, timeout=60)


@pytest.mark.parametrize("command", ["cp", "mv"])
@pytest.mark.parametrize("target", ["link/iter_0000002", "link/", "link/iter_0000002/inside", "above/run/iter_0000002"])
def test_a_checkpoint_stays_whose_destination_is_itself_through_a_link(
    ckpt: Ckpt, tmp_path: Path, command: str, target: str
) -> None:
    root = save(tmp_path / "lustre" / "run", 1, 2)
    (tmp_path / "link").symlink_to("lustre/run")
    (tmp_path / "above").symlink_to("lustre")
    for source in (f"{root}@2", f"{tmp_path}/link@2"):
        code, _, error = ckpt(command, source, f"{tmp_path}/{target}")
        assert code == 2 and "is the checkpoint itself, or inside of it; name another place." in error
    verify_checkpoint(FileStorage(), str(root / "iter_0000002"))
