"""A second start in a folder in which a run still saves; and who counts as still running."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from owners import owned_by
from ranks import run_ranks

from ckpt_component import CheckpointFencedError, CheckpointInUseError, CheckpointManager, build_manager
from ckpt_component.cli.app import main
from ckpt_component.core.commit.names import OWNER
from ckpt_component.core.processes.running import ProcessName

STATE = {"weight": torch.ones(3)}
RESTORES_ONLY = ("checkpoint.save.every_steps=null", "checkpoint.save.at_end=false")
TAKEOVER = "checkpoint.takeover=true"

LIVING = """
    import sys, torch
    from ckpt_component import CheckpointError, build_manager
    manager = build_manager("sync", ["checkpoint.save.at_end=false"], dir=sys.argv[1])
    for line in sys.stdin:
        try:
            manager.save(int(line), {"weight": torch.ones(3)})
            print("saved", flush=True)
        except CheckpointError as error:
            print(type(error).__name__, flush=True)
"""


def manager_in(root: Path, *overrides: str, preset: str = "sync") -> CheckpointManager:
    return build_manager(preset, ["checkpoint.save.at_end=false", *overrides], dir=root)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A living process of this host."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.communicate(b"\n", timeout=20)


def ended_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_second_start_is_refused_and_says_who_is_there(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    owned_by(tmp_path, sleeper.pid)
    with pytest.raises(CheckpointInUseError) as caught:
        manager_in(tmp_path)
    text = str(caught.value)
    assert f"checkpoint.dir={tmp_path}: another run saves there, process {sleeper.pid} on " in text
    assert " since 20" in text and TAKEOVER in text and " ".join(RESTORES_ONLY) in text
    assert os.listdir(tmp_path) == [OWNER]  # nothing was left, and the other run still owns the folder
    manager_in(tmp_path, *RESTORES_ONLY).close()  # what only restores is not refused


def test_a_takeover_is_a_warning_and_the_folder_is_its_own(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    owned_by(tmp_path, sleeper.pid)
    with manager_in(tmp_path, TAKEOVER) as manager:
        assert f"process {sleeper.pid} on" in caplog.text and TAKEOVER in caplog.text
        manager.save(1, STATE)
    assert json.loads((tmp_path / OWNER).read_text())["generation"] == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"host": "elsewhere"},
        {"space": "0a1b2c3d"},
        {"space": ""},
        {"started": 1},
        {"started": 0},
        {"released": True},
        {"pid": "ended"},
        {"pid": 2**40},
        {"pid": -1},
    ],
    ids=str,
)
def test_what_may_have_ended_is_not_refused(
    changes: dict[str, Any], tmp_path: Path, sleeper: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """A requeued job must not be hindered, on the same host or on another one."""
    pid = ended_pid() if changes.get("pid") == "ended" else changes.get("pid", sleeper.pid)
    owned_by(tmp_path, pid, **{name: value for name, value in changes.items() if name != "pid"})
    with manager_in(tmp_path) as manager:
        assert manager.save(1, STATE)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_owner_file_of_an_earlier_version_is_read(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    owner = {"generation": 3, "token": "a", "host": ProcessName.current().host, "pid": sleeper.pid, "since": 1.5}
    (tmp_path / OWNER).write_text(json.dumps(owner))
    with manager_in(tmp_path) as manager:  # not refused: another container may have had that number
        manager.save(1, STATE)
        assert json.loads((tmp_path / OWNER).read_text())["generation"] == 4


@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_a_closed_manager_has_released_its_folder(
    preset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manager_in(tmp_path, preset=preset) as manager:
        manager.save(1, STATE)
        manager.wait()
        assert not json.loads((tmp_path / OWNER).read_text())["released"]
    assert json.loads((tmp_path / OWNER).read_text())["released"]
    with manager_in(tmp_path) as again:
        again.save(2, STATE)
    assert caplog.text == ""


def test_a_second_manager_of_this_process_is_told_to_close_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A notebook cell that is run twice."""
    with manager_in(tmp_path) as old:
        old.save(1, STATE)
        with manager_in(tmp_path) as new:
            assert "another manager of this process saves there; close() the one you no longer need" in caplog.text
            new.save(2, STATE)
            with pytest.raises(
                CheckpointFencedError, match="^Another manager of this process took over .* close\\(\\)"
            ):
                old.save(3, STATE)
            new.save(4, STATE)
            assert new.steps() == [1, 2, 4]


def test_a_release_that_comes_after_the_takeover_costs_the_successor_nothing(tmp_path: Path) -> None:
    """The old run looked whose the folder is, was overtaken, and then wrote that it has ended."""
    with manager_in(tmp_path) as old:
        old.save(1, STATE)
        before = json.loads((tmp_path / OWNER).read_text())
        with manager_in(tmp_path) as new:
            new.save(2, STATE)
            (tmp_path / OWNER).write_text(json.dumps({**before, "released": True}))
            new.save(3, STATE)
            assert json.loads((tmp_path / OWNER).read_text())["generation"] == 2


def test_a_release_does_not_let_a_predecessor_back_in(tmp_path: Path) -> None:
    with manager_in(tmp_path) as old:
        old.save(1, STATE)
        with manager_in(tmp_path) as new:
            new.save(2, STATE)
        with pytest.raises(CheckpointFencedError):
            old.save(3, STATE)


def test_the_tools_and_a_rewind_go_by_the_same_rule(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    def ckpt(*arguments: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as leaving:
            main([*map(str, arguments)])
        return int(leaving.value.code or 0), capsys.readouterr().err

    with manager_in(tmp_path, "checkpoint.keep.last=null") as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, STATE)
    # A run in another container of this host: alive for all that can be known, until the user says that it has ended.
    for space in ("0a1b2c3d", ""):
        owned_by(tmp_path, ended_pid(), space=space)
        for command in (("rm", f"{tmp_path}@1"), ("gc", tmp_path, "--keep-last", 1)):
            code, text = ckpt(*command)
            assert code == 2 and "may be alive" in text and "--ended" in text
    assert ckpt("rm", f"{tmp_path}@1", "--ended")[0] == 0
    owned_by(tmp_path, os.getppid(), started=1)  # the number was used again
    assert ckpt("rm", f"{tmp_path}@2")[0] == 0
    owned_by(tmp_path, sleeper.pid)
    assert ckpt("rm", f"{tmp_path}@3", "--ended")[0] == 2
    options = ("checkpoint.resume=3", "checkpoint.rewind=true")
    with manager_in(tmp_path, *options, TAKEOVER) as manager:
        assert manager.restore({"weight": torch.zeros(3)}) == 3 and manager.steps() == [3]


@pytest.mark.turns(3)
@pytest.mark.slow
def test_a_run_in_another_process_is_refused_until_it_closes_its_manager(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(LIVING), str(tmp_path)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert other.stdin is not None and other.stdout is not None

    def tell(line: str) -> str:
        other.stdin.write(f"{line}\n")  # type: ignore[union-attr]
        return other.stdout.readline().strip()  # type: ignore[union-attr]

    try:
        assert tell("1") == "saved"
        with pytest.raises(CheckpointInUseError, match=f"process {other.pid} on"):
            manager_in(tmp_path)
        assert tell("2") == "saved"  # it has lost nothing
        with manager_in(tmp_path, TAKEOVER) as manager:
            manager.save(3, STATE)
            assert tell("4") == "CheckpointFencedError"
            assert manager.steps() == [1, 2, 3]
    finally:
        other.communicate(timeout=60)
    with manager_in(tmp_path) as manager:
        assert manager.restore({"weight": torch.zeros(3)}) == 3


@pytest.mark.slow
def test_all_ranks_are_refused(tmp_path: Path) -> None:
    owned_by(tmp_path / "run", os.getpid())
    run_ranks(Path(__file__).parent / "scripts" / "in_use.py", "refused", 2, tmp_path)


@pytest.mark.turns(3)
@pytest.mark.slow
def test_containers_with_the_name_of_the_host_are_told_apart(tmp_path: Path) -> None:
    """Runs in PID namespaces: one that lives is not taken as dead, and one that is dead not as alive."""
    unshare = ("unshare", "-pf", "--mount-proc", "--kill-child")
    try:
        subprocess.run([*unshare, "true"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("PID namespaces cannot be made here")
    code = (
        "import sys, torch; from ckpt_component import build_manager; m = build_manager('sync', dir=sys.argv[1]);"
        "m.save(1, {'w': torch.ones(3)}); m.save(2, {'w': torch.ones(3)});"
        "print('saved', flush=True); sys.stdin.readline(); import os; os._exit(0)"
    )
    command = [*unshare, sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None and run.stdout.readline() == "saved\n"
            assert json.loads((tmp_path / OWNER).read_text())["pid"] == 1  # a process that lives here, too
            with pytest.raises(SystemExit) as leaving:
                main(["rm", f"{tmp_path}@1"])
            assert leaving.value.code == 2
            same = [sys.executable, "-c", "from ckpt_component import build_manager; import sys;"]
            same[-1] += "build_manager('sync', dir=sys.argv[1]).close()"
            assert (
                subprocess.run([*same, str(tmp_path)], timeout=60, check=False).returncode == 0
            )  # unknown: not refused
        finally:
            run.communicate("\n", timeout=60)
    with pytest.raises(SystemExit) as leaving:
        main(["rm", f"{tmp_path}@1", "--ended"])
    assert not leaving.value.code
