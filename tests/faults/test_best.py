"""Kill -9 at the operations of a save that retires a better, or the best, checkpoint: the best one stays."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from evidence import Record
from faults.invariants import MANIFEST_MODE
from forker import Forker
from strides import first_of

from ckpt_component.core.storage.faults.failpoints import EFFECTS
from ckpt_component.core.storage.faults.operation_log import read_log

pytestmark = pytest.mark.slow

MANY = 400


@pytest.mark.parametrize(
    ("losses", "preset", "overrides", "stride"),
    [
        ([0.1, 0.5, 0.3], "sync", [], 31),  # the last one is worse, and takes the place of the second
        ([0.2, 0.5, 0.1], "async_persistent", [], 37),  # it is better, and takes the place of both
        ([0.2, 0.5, 0.1], "sync", [MANIFEST_MODE], 31),
        pytest.param([0.1, 0.5, 0.3], "async_persistent", [], 1, marks=pytest.mark.soak),
        pytest.param([0.2, 0.5, 0.1], "async_persistent", [], 1, marks=pytest.mark.soak),
    ],
)
def test_the_best_one_survives_a_kill_at_every_operation(
    losses: Sequence[float],
    preset: str,
    overrides: Sequence[str],
    stride: int,
    forker: Forker,
    tmp_path: Path,
    record_property: Record,
) -> None:
    kills, wrong = 0, list[str]()
    for number in range(first_of(stride), MANY, stride):
        root, log = str(tmp_path / f"root{number}"), str(tmp_path / f"ops{number}")
        pid = forker.fork(
            "faults.workloads:best_round",
            root=root,
            preset=preset,
            losses=losses,
            failpoint=f"any:nth={number}:action=kill",
            log=log,
            overrides=list(overrides),
        )
        ended = forker.wait(pid)
        forker.drain()
        fired = [each for each in read_log(f"{log}.fired") if each.operation in EFFECTS]
        # A writer process that was killed fails the save; the trainer ends with its error.
        if not fired and ended.code != 0:
            wrong.append(f"{number}: exit {ended.code}\n{ended.output}")
        best = min(losses[:-1] if fired else losses)
        found = forker.run("faults.workloads:check_best", root=root, loss=best, overrides=list(overrides))
        wrong += [f"after a kill at {number} ({fired[0] if fired else 'end'}): {text}" for text in found]
        if wrong or not fired:
            break
        assert ended.code == -signal.SIGKILL or fired[0].process == "writer", ended
        kills += 1
    record_property("kills", kills)
    assert not wrong, "\n".join(wrong)
    assert 30 / stride < kills < MANY // stride - 1
