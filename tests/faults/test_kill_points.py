"""Kill -9 at file operations of a save with retirement, until a run ends before its number comes up.

`tests/world` visits every operation of a save in one process, and this the border between trainer and writer.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from evidence import Record
from faults.lives import KEEP
from faults.workloads import newest_ack
from forker import Forker
from strides import first_of

from ckpt_component.core.commit.names import ALIVE_PREFIX, MEGATRON
from ckpt_component.core.storage.failpoint_fs import EFFECTS, read_log
from ckpt_component.core.storage.files import FAILPOINT, FAILPOINT_LOG

pytestmark = pytest.mark.slow

#: More operations than any save here has: an enumeration that never ends is a defect of the rig.
MANY = 300
RANKS = [
    ("sync", 0, "trainer"),
    *(("async_persistent", *each) for each in ((0, "trainer"), (0, "writer"), (1, "writer"))),
]
ASYNC_VICTIMS = [("async_persistent", victim) for victim in ("self", "other", "all")]


def enumerate_kills(
    forker: Forker,
    folder: Path,
    preset: str,
    victim: str,
    overrides: Sequence[str] = (),
    stride: int = 1,
    always: str = "",
) -> tuple[int, list[str]]:
    """Kill at operation 1, 2, 3 ... of a save, and check after each.

    Args:
        forker: of the session.
        folder: empty.
        preset: of the save.
        victim: who is killed: `self`, the process that is at the operation; `other`, the one that is not, while the
            first stands still there; `all`.
        overrides: of the run.
        stride: 3 for every third operation.
        always: a failpoint that is set from start to end, also while what a crash left is looked at.

    Returns:
        How many kills there were, and what was wrong after them.
    """
    root, acks, wrong = str(folder / "root"), str(folder / "acks"), []
    kills = 0
    env = {FAILPOINT: always, FAILPOINT_LOG: str(folder / "looks")} if always else {}
    for number in range(first_of(stride), MANY, stride):
        log = str(folder / f"ops{number}")
        action = "kill" if victim == "self" else "stop"
        pid = forker.fork(
            "faults.workloads:crash_round",
            root=root,
            preset=preset,
            acks=acks,
            env=env,
            failpoint=f"any:nth={number}:action={action}{';' * bool(always)}{always}",
            log=log,
            overrides=list(overrides),
        )
        ended = forker.wait(pid, fired=log)
        if ended.stopped is not None:
            kill_at(ended.stopped, pid, victim)
            ended = forker.wait(pid)
        left = forker.drain()
        fired = [each for each in read_log(f"{log}.fired") if each.operation in EFFECTS]
        told = f"{victim} at {number} ({fired[0] if fired else 'end'})"
        found = (ended.value or {}).get("violations", [])
        wrong += [f"before {told}: {text}" for text in found]
        wrong += [f"after {told}: left {left}"] * bool(left)
        over = bool(fired) and fired[0].operation == "unlink" and ALIVE_PREFIX in fired[0].path
        if fired and victim == "other" and fired[0].process == "writer" and not over:
            # All was staged when the trainer died, so its writer process finishes the checkpoint. When it deletes its
            # mark of life, that save is over, and the next one may not have begun.
            orphan = os.path.join(root, MEGATRON.folder(newest_ack(acks) + 1))
            wrong += [] if os.path.isdir(orphan) else [f"{told}: the writer process did not commit {orphan}"]
        # Killed, or a writer process was and the trainer went on.
        if ended.code not in ((0, -signal.SIGKILL) if fired else (0,)):
            wrong.append(f"{told}: exit {ended.code}\n{ended.output}")
        if wrong or not fired:
            break
        kills += 1
    wrong += [] if wrong else forker.run("faults.workloads:check", env, root=root, acks=acks, overrides=list(overrides))
    return kills, wrong


def kill_at(stopped: int, trainer: int, victim: str) -> None:
    """A process stands still at its operation: kill the other one and let it go on, or kill both."""
    children = Path(f"/proc/{trainer}/task/{trainer}/children").read_text().split()
    both = {trainer, *map(int, children)}
    for pid in both - {stopped}:
        os.kill(pid, signal.SIGKILL)
    # One signal: after SIGKILL, which wakes it too, it may be gone.
    os.kill(stopped, signal.SIGKILL if victim == "all" else signal.SIGCONT)


@pytest.mark.parametrize(
    ("preset", "victim", "stride"),
    [
        ("async_persistent", "self", 29),
        ("async_persistent", "other", 23),
        ("async_persistent", "all", 27),
        *(pytest.param(*case, 1, marks=pytest.mark.soak) for case in [("sync", "self"), *ASYNC_VICTIMS]),
    ],
)
def test_kill_at_every_operation(
    preset: str, victim: str, stride: int, forker: Forker, tmp_path: Path, record_property: Record
) -> None:
    kills, wrong = enumerate_kills(forker, tmp_path, preset, victim, stride=stride)
    print(f"{preset}, {victim}: {kills} kills, {len(wrong)} violations")
    record_property("kills", kills)
    assert not wrong, "\n".join(wrong)
    assert 30 / stride < kills < MANY // stride - 1


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("preset", "rank", "process", "stride"),
    [
        ("async_persistent", 0, "trainer", 39),
        ("async_persistent", 1, "writer", 18),
        *(pytest.param(*case, 1, marks=[pytest.mark.soak, pytest.mark.timeout(900)]) for case in RANKS),
    ],
)
def test_kill_one_of_two_ranks(
    preset: str, rank: int, process: str, stride: int, forker: Forker, tmp_path: Path, record_property: Record
) -> None:
    """Two ranks, three saves; one of the four processes is killed at every few operations.

    With one rank every operation has its turn; here the next life finds all in order, and that on both ranks.
    """
    root, acks, wrong, kills = str(tmp_path / "root"), str(tmp_path / "acks"), [], 0
    for number in range(first_of(stride), MANY, stride):
        log = str(tmp_path / f"ops{number}")
        common: dict[str, Any] = {"root": root, "acks": acks, "saves": 3, "log": log, "preset": preset, "world_size": 2}
        failpoint = f"any:rank={rank}:process={process}:nth={number}:action=kill"
        pids = [
            forker.fork("faults.lives:live_on_ranks", rank=each, failpoint=failpoint, **common) for each in range(2)
        ]
        ended = [forker.wait(pid) for pid in pids]
        fired = read_log(f"{log}.fired")
        told = f"{process} of rank {rank} at {number} ({fired[0] if fired else 'end'})"
        for each in ended:
            wrong += [f"before {told}: {text}" for text in (each.value or {}).get("violations", [])]
            if each.code not in (0, -signal.SIGKILL) or (not fired and (each.value or {}).get("failed")):
                wrong.append(f"{told}: exit {each.code}, {each.value}\n{each.output}")
        left = forker.drain()
        wrong += [f"after {told}: left {left}"] * bool(left)
        if wrong or not fired:
            break
        kills += 1
    wrong += [] if wrong else forker.run("faults.workloads:check", root=root, acks=acks, keep=KEEP)
    print(f"{preset}, {process} of rank {rank}: {kills} kills, {len(wrong)} violations")
    record_property("kills", kills)
    assert not wrong, "\n".join(wrong)
    assert kills > 20 / stride
