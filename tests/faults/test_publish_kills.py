"""Kill -9 at every file operation of a version: what is there is whole, and the next version goes on with the chain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forker import Forker
from publishing.publish_worlds import bytes_of, save, weights_at
from publishing.published_format import is_delta, pull
from strides import first_of

from ckpt_component.core.storage.failpoint_fs import read_log
from ckpt_component.core.storage.locate import storage_at
from ckpt_component.publishing.versions import Versions, chain_to

pytestmark = pytest.mark.slow

#: More operations than a version has.
MANY = 300
#: Checkpoints that are published in turn.
STEPS = 4


@pytest.mark.parametrize("delta", ["auto", "off"])
def test_a_kill_at_any_operation_leaves_whole_versions(delta: str, forker: Forker, tmp_path: Path) -> None:
    to, expected = tmp_path / "to", [bytes_of(weights_at(step)) for step in range(STEPS)]
    sources = [save(tmp_path, step, weights_at(step)) for step in range(STEPS)]
    turn, kills, kinds = 0, 0, set[bool]()

    def version(failpoint: str, log: Path) -> int | None:
        """Publish the next checkpoint; None if the process was killed."""
        nonlocal turn
        turn += 1
        step = turn % STEPS
        arguments: dict[str, Any] = {"root": str(tmp_path), "source": sources[step], "step": step, "delta": delta}
        pid = forker.fork("faults.publish_rounds:publish_round", **arguments, failpoint=failpoint, log=str(log))
        ended = forker.wait(pid)
        assert not forker.drain()
        assert ended.code == 0 or failpoint, ended.output
        return None if ended.code else int(ended.value)

    def check(newest: int | None) -> int:
        """All versions that are there give the weights of their checkpoints; returns the newest."""
        there = Versions(storage_at(to), str(to)).look()
        for number, found in there.items():
            assert found.step is not None
            if all(each in there for each in range(chain_to(there, number, None)[0].number, number)):
                assert pull(to, number) == expected[found.step]
        if newest is not None:
            assert max(there) == newest
            kinds.add(is_delta(to / f"weight_v{newest:06d}"))
        return max(there, default=0)

    newest = check(version("", tmp_path / "first"))
    stride = 3
    for number in range(first_of(stride), MANY, stride):
        log = tmp_path / f"log{number}"
        done = version(f"any:process=publish:nth={number}:action=kill", log)
        after = check(done)
        assert after in (newest, newest + 1)
        if done is not None:
            break
        kills += 1
        assert len(read_log(f"{log}.fired")) == 1
        newest = check(version("", tmp_path / f"log{number}-next"))
        assert newest == after + 1, "numbers go on without a gap"
        newest = check(version("", tmp_path / f"log{number}-third"))
    assert kills > (12 if delta == "auto" else 8) and number < MANY - stride
    assert kinds == ({False, True} if delta == "auto" else {False})
