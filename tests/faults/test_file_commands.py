"""`ckpt cp`, `mv`, `rm` and `gc` are killed, or fail, at every file operation; then they are run again."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from evidence import Record
from faults.invariants import age
from forker import Forker
from strides import first_of

from ckpt_component import build_manager
from ckpt_component.core.commit.names import MEGATRON, OWNER, STAGING_PREFIX, TRASH_PREFIX, staging_path, trash_path
from ckpt_component.core.commit.scan import read_pointer, scan_steps
from ckpt_component.core.storage.failpoint_fs import read_log
from ckpt_component.core.storage.files import FAILPOINT_LOG, FileStorage
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.formats.verification import verify_checkpoint

MANY = 200
#: With it operations are counted, and nothing fails.
NEVER = "any:nth=100000:action=kill"
#: Command, its arguments, the steps of the two roots at the end, and whether they are on two file systems.
COMMANDS = {
    "cp": (["cp", "{a}@2", "{b}@9"], ([1, 2, 3], [4, 9]), False),
    "mv": (["mv", "{a}@3", "{b}/"], ([1, 2], [3, 4]), False),
    "mv across": (["mv", "{a}@3", "{b}@9"], ([1, 2], [4, 9]), True),
    "rm": (["rm", "{a}@3", "{a}@1"], ([2], [4]), False),
    "gc": (["gc", "{a}", "--keep-last", "1"], ([3], [4]), False),
}


@pytest.fixture(scope="module")
def commands() -> Iterator[Forker]:
    server = Forker(["faults.file_commands"], adopts=True)
    yield server
    server.close()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two roots, the first with what a dead save and a dead deletion left."""
    folder = tmp_path_factory.mktemp("template")
    for root, steps in (("a", (1, 2, 3)), ("b", (4,))):
        with build_manager(
            "sync", ["checkpoint.save.at_end=false", "checkpoint.keep.last=null"], dir=folder / root
        ) as run:
            for step in steps:
                run.save(step, {"weight": torch.full((64,), float(step)), "step": step})
        (folder / root / OWNER).unlink()  # this process, which is alive
    shutil.copytree(folder / "a/iter_0000001", staging_path(str(folder / "a/iter_0000005"), new_token()))
    shutil.copytree(folder / "a/iter_0000001", trash_path(str(folder / "a/iter_0000000")))
    return folder


def steps_of(root: Path) -> list[int]:
    """The committed steps; every folder that is named like a step is one, and has its bytes."""
    scan = scan_steps(FileStorage(), str(root), MEGATRON)
    named = [step for name in os.listdir(root) if (step := MEGATRON.step(name)) is not None]
    assert sorted(named) == scan.committed, f"half a checkpoint is visible: {scan}"
    for step in named:
        verify_checkpoint(FileStorage(), str(root / MEGATRON.folder(step)))
    pointed = read_pointer(FileStorage(), str(root), MEGATRON)
    assert pointed is None or pointed in named, f"the pointer names {pointed}"
    assert pointed is not None or not named, "no pointer"
    return scan.committed


def check(kind: str, a: list[int], b: list[int]) -> None:
    """No good checkpoint is lost that the command was not asked to delete."""
    if kind == "cp":
        assert a == [1, 2, 3] and set(b) - {9} == {4}
    elif kind.startswith("mv"):
        assert set(a) - {3} == {1, 2} and set(b) - {3, 9} == {4} and (3 in a or {3, 9} & {*b})
    else:
        assert {2 if kind == "rm" else 3} <= set(a) and b == [4]


def run_through(kind: str, action: str, stride: int, forker: Forker, template: Path, folder: Path) -> int:
    """Go through the operations of a command; returns how many faults there were."""
    words, (a, b), across = COMMANDS[kind]
    for faults, number in enumerate(range(first_of(stride), MANY, stride)):
        place = folder / str(number)
        shutil.copytree(template, place)
        age(str(place))
        arguments = [word.format(a=place / "a", b=place / "b") for word in words]
        log = str(folder / f"log{number}")
        pid = forker.fork(
            "faults.file_commands:ckpt",
            arguments=arguments,
            failpoint=f"any:nth={number}:action={action}",
            log=log,
            across=across,
        )
        ended = forker.wait(pid)
        fired = read_log(f"{log}.fired")
        told = f"{kind} at {number}: {fired[0] if fired else 'end'}\n{ended.output}"
        assert ended.code == (-signal.SIGKILL if fired and action == "kill" else 0), told
        assert ended.value in (None, 0, 1, 2), told
        try:
            there = steps_of(place / "a"), steps_of(place / "b")
            check(kind, *there)
        except AssertionError as error:
            raise AssertionError(f"after {told}{error}") from error
        done = there == (a, b)
        age(str(place))
        again = forker.run(
            "faults.file_commands:ckpt", {FAILPOINT_LOG: ""}, arguments=arguments, failpoint="", log="", across=across
        )
        # What is gone cannot be moved or deleted once more.
        assert again == 0 or (done and kind != "cp" and kind != "gc") or kind == "rm", f"again after {told}"
        if kind != "rm":
            assert (steps_of(place / "a"), steps_of(place / "b")) == (a, b), told
        elif not fired:
            assert there == (a, b)
        left = [name for name in os.listdir(place / "b") if name.startswith((STAGING_PREFIX, TRASH_PREFIX))]
        assert not left, f"{left} after {told}"
        shutil.rmtree(place)
        if not fired:
            return faults
    raise AssertionError("an enumeration that does not end")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stride"), [("cp", 9), ("mv", 4), ("mv across", 12), ("rm", 5), ("gc", 7)])
def test_a_kill_at_an_operation(
    kind: str, stride: int, commands: Forker, template: Path, tmp_path: Path, record_property: Record
) -> None:
    kills = run_through(kind, "kill", stride, commands, template, tmp_path)
    record_property("kills", kills)
    assert kills > 0


@pytest.mark.parametrize("kind", ["cp", "mv", "mv across"])
def test_all_is_durable_before_it_is_visible(kind: str, commands: Forker, template: Path, tmp_path: Path) -> None:
    shutil.copytree(template, tmp_path / "roots")
    words, _, across = COMMANDS[kind]
    arguments = [word.format(a=tmp_path / "roots/a", b=tmp_path / "roots/b") for word in words]
    log = str(tmp_path / "log")
    assert commands.run("faults.file_commands:ckpt", arguments=arguments, failpoint=NEVER, log=log, across=across) == 0
    calls = [(each.operation, each.path) for each in read_log(log)]
    target = tmp_path / "roots/b" / MEGATRON.folder(3 if kind == "mv" else 9)
    commit = len(calls) - 1 - calls[::-1].index(("rename_new", str(target)))  # an earlier one tried to move it
    created = [path for operation, path in calls[:commit] if operation == "create" and target.name in path]
    assert len(created) == (0 if kind == "mv" else len(os.listdir(target)))
    for path in created:
        last = max(number for number, call in enumerate(calls[:commit]) if call in (("copy", path), ("write", path)))
        assert ("sync", path) in calls[last:commit]
    if created:
        assert ("sync_folder", os.path.dirname(created[-1])) in calls[calls.index(("create", created[-1])) : commit]
    assert ("sync_folder", str(target.parent)) in calls[commit:]
    if kind == "mv across":
        gone = next(number for number, (_, path) in enumerate(calls) if f"a/{TRASH_PREFIX}{MEGATRON.folder(3)}" in path)
        assert ("sync_folder", str(target.parent)) in calls[commit:gone]


@pytest.mark.parametrize(
    ("kind", "action", "stride"),
    [
        pytest.param("mv", "raise:EIO", 8, marks=pytest.mark.slow),  # cp, rm and gc: tests/world
        pytest.param("mv across", "raise:ENOSPC", 12, marks=pytest.mark.slow),
        *(
            pytest.param(kind, action, 1, marks=[pytest.mark.soak, pytest.mark.timeout(400)])
            for kind in COMMANDS
            for action in ("kill", "raise:EIO", "raise:ENOSPC")
        ),
    ],
)
def test_a_fault_at_an_operation(
    kind: str, action: str, stride: int, commands: Forker, template: Path, tmp_path: Path, record_property: Record
) -> None:
    faults = run_through(kind, action, stride, commands, template, tmp_path)
    record_property("kills" if action == "kill" else "failing calls", faults)
    assert faults > 0
