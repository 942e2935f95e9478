"""File operations of a save fail, once and for good; short writes; a block of one of two writers.

`tests/world` has each operation of a save in one process fail.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from evidence import Record
from faults.lives import KEEP
from faults.workloads import newest_ack
from forker import Forker
from strides import first_of, in_turn

from ckpt_component.core.storage.failpoint_fs import read_log

pytestmark = pytest.mark.slow
ALL = [pytest.mark.soak, pytest.mark.timeout(400)]


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("preset", "stride"),
    [("async_persistent", 23), *(pytest.param(each, 1, marks=ALL) for each in ("sync", "async_persistent"))],
)
@pytest.mark.parametrize("sticky", [False, True], ids=["once", "from_then_on"])
def test_every_operation_fails(
    preset: str, sticky: bool, stride: int, forker: Forker, tmp_path: Path, record_property: Record
) -> None:
    found = forker.run(
        "faults.scenarios:fail_everywhere",
        timeout=390,
        first=first_of(stride),
        stride=stride,
        root=str(tmp_path / "root"),
        preset=preset,
        operation="any",
        code="EIO",
        sticky=sticky,
        logs=str(tmp_path),
    )
    record_property("failing calls", found["aborted"] + found["survived"])
    assert found["wrong"] == []
    assert found["aborted"] > 20 / stride
    assert found["survived"] > 8 / stride - 1  # of pointer and retirement


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("preset", "rank", "process", "stride"),
    [("sync", 0, "trainer", 17), ("async_persistent", 1, "writer", 5)],
)
def test_operations_of_one_of_two_ranks_fail(
    preset: str, rank: int, process: str, stride: int, forker: Forker, tmp_path: Path
) -> None:
    """Either both ranks hear of it with the errno and nothing is committed, or neither does and all is there."""
    root, acks, told, failures = str(tmp_path / "root"), str(tmp_path / "acks"), set(), 0
    for number in range(first_of(stride), 300, stride):
        log, before = str(tmp_path / f"ops{number}"), newest_ack(acks)
        failpoint = f"any:rank={rank}:process={process}:nth={number}:action=raise:EIO"
        common: dict[str, Any] = {
            "root": root,
            "acks": acks,
            "saves": 1,
            "log": log,
            "preset": preset,
            "all_live": True,
        }
        pids = [
            forker.fork("faults.lives:live_on_ranks", rank=each, world_size=2, failpoint=failpoint, **common)
            for each in range(2)
        ]
        ended = [forker.wait(pid) for pid in pids]
        assert all(each.code == 0 and each.value["violations"] == [] for each in ended), ended
        assert forker.drain() == []
        fired = read_log(f"{log}.fired")
        failed = [each.value["failed"] for each in ended]
        assert len({text is None for text in failed}) == 1, (number, fired, failed)
        if failed[0] is None:
            assert newest_ack(acks) > before
        else:
            assert fired and all("Input/output error" in text or "EIO" in text for text in failed), (number, failed)
            told.add(fired[0].operation)
            failures += 1
        wrong = forker.run("faults.workloads:check", root=root, acks=acks, keep=KEEP)
        assert wrong == [], f"after {number} ({fired}): {wrong}"
        if not fired:
            break
    print(f"{preset}, {process} of rank {rank}: {failures} failed saves of two ranks, in {sorted(told)}")
    assert failures > 1 and not fired


@pytest.mark.parametrize(
    ("preset", "operation", "stride"),
    in_turn(
        [
            (preset, *case)
            for preset in ("sync", "async_persistent")
            for case in (("names", 3), ("size", 3), ("read", 3), ("flock", 1))
        ],
        4,
    ),
)
def test_looking_fails(preset: str, operation: str, stride: int, forker: Forker, tmp_path: Path) -> None:
    found = forker.run(
        "faults.scenarios:fail_everywhere",
        first=first_of(stride),
        stride=stride,
        root=str(tmp_path / "root"),
        preset=preset,
        operation=operation,
        code="EIO",
        sticky=False,
        logs=str(tmp_path),
    )
    assert found["wrong"] == []
    assert found["aborted"] + found["survived"] > 0


def test_short_writes_are_continued(forker: Forker, tmp_path: Path) -> None:
    given: dict[str, Any] = {"root": str(tmp_path / "root"), "preset": "async_persistent", "logs": str(tmp_path)}
    found = forker.run("faults.scenarios:cut_writes", **given)
    assert found["fired"] >= 5
    assert found["error"] is None and found["wrong"] == []


@pytest.mark.parametrize(("preset", "block"), [("sync", 5), ("async_persistent", 2)])
def test_a_writer_thread_fails_in_the_nth_block(preset: str, block: int, forker: Forker, tmp_path: Path) -> None:
    found = forker.run(
        "faults.scenarios:fail_block", root=str(tmp_path / "root"), preset=preset, block=block, logs=str(tmp_path)
    )
    assert found["fired"] == 1
    assert found["errno"] == errno.EIO
    assert found["there"] == []  # no `.metadata`, nothing at all
    assert found["again"] is None and found["wrong"] == []
