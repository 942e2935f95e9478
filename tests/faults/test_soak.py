"""Seeded random kills of writer process, trainer, rank, and all, over a loop of lives of a training job.

pytest tests/faults/test_soak.py                                the short form
pytest --run-soak tests/faults/test_soak.py                     500 kills, on one and on two ranks
CKPT_SOAK_SEED=7 CKPT_SOAK_KILLS=2000 pytest --run-soak ...     another seed, more of them
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from evidence import Record
from faults.lives import KEEP
from forker import Ended, Forker

SEED = int(os.environ.get("CKPT_SOAK_SEED", "4"))
SAVES = 4
#: A life of so many saves has about this many file operations.
OPERATIONS = 200
PRESETS = ("sync", "async_persistent", "async_persistent", "async_temporal")


class Soak:
    """Lives one after the other in one folder, each ended by a kill.

    Args:
        forker: of the session.
        folder: empty.
        ranks: how many a life has.
        seed: of all choices.
    """

    def __init__(self, forker: Forker, folder: Path, ranks: int, seed: int) -> None:
        self.forker, self.folder, self.ranks = forker, folder, ranks
        self.choose = random.Random(seed)
        self.root, self.acks = str(folder / "root"), str(folder / "acks")
        self.kills: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.lives = 0

    def life(self) -> None:
        """Start a job, and kill at a file operation or at a moment; then see what the next life says."""
        self.lives += 1
        before = self.kills.total()
        choose = self.choose
        preset, victim = choose.choice(PRESETS), choose.choice(("self", "writer", "trainer", "all"))
        log = str(self.folder / f"life{self.lives}")
        failpoint = f"any:nth={choose.randint(1, OPERATIONS * self.ranks)}:action=stop"
        moment = None if choose.random() < 0.6 else choose.uniform(0, 0.4)
        patient = choose.random() < 0.5
        pids = self.start(preset, log, failpoint if moment is None else "")
        if moment is None:
            first = self.forker.wait_any(pids, fired=log)
            if first.stopped is not None:
                self.kill(victim, pids, first.stopped)
        else:
            deadline = time.monotonic() + 30
            while not all(os.path.exists(f"{log}.ready{rank}") for rank in range(self.ranks)):
                assert time.monotonic() < deadline, "the ranks did not come up"
                time.sleep(0.001)
            time.sleep(moment)  # any moment will do
            self.kill(victim, pids, None)
        harmed = self.kills.total() > before
        for rank, pid in enumerate(pids):
            self.judge(self.forker.wait(pid), harmed, f"life {self.lives} ({preset}, {victim}), rank {rank}")
        # Otherwise the next life meets writer processes that are still finishing.
        left = self.forker.drain() if patient else []
        self.wrong += [f"life {self.lives}: left {left}"] * bool(left)

    def start(self, preset: str, log: str, failpoint: str) -> list[int]:
        """The processes of a job."""
        common: dict[str, Any] = {
            "root": self.root,
            "acks": self.acks,
            "saves": SAVES,
            "log": log,
            "failpoint": failpoint,
        }
        if self.ranks == 1:
            return [self.forker.fork("faults.lives:live", preset=preset, **common)]
        return [
            self.forker.fork("faults.lives:live_on_ranks", rank=rank, world_size=self.ranks, preset=preset, **common)
            for rank in range(self.ranks)
        ]

    def kill(self, victim: str, pids: list[int], stopped: int | None) -> None:
        """Kill -9 whom the dice say: the stopped process, some rank's trainer or writer process, or all of them."""
        writers = [child for pid in pids for child in children_of(pid)]
        some_trainer = self.choose.choice(pids)
        chosen = {
            "self": [some_trainer if stopped is None else stopped],
            "writer": [self.choose.choice(writers)] if writers else [],
            "trainer": [some_trainer],
            "all": [*pids, *writers],
        }[victim]
        for pid in chosen:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself in this very moment
                os.kill(pid, signal.SIGKILL)
                self.kills[victim] += 1
        if stopped is not None and stopped not in chosen:
            os.kill(stopped, signal.SIGCONT)

    def judge(self, ended: Ended, harmed: bool, who: str) -> None:
        """A life ends by itself or by our kill, has found nothing wrong, and saved all when nobody was killed."""
        if not harmed and (ended.value or {}).get("failed"):
            self.wrong.append(f"{who}: nothing was killed, and saves failed: {ended.value}")
        if ended.code not in (0, -signal.SIGKILL):
            self.wrong.append(f"{who}: exit {ended.code}\n{ended.output}")
        self.wrong += [f"before {who}: {text}" for text in (ended.value or {}).get("violations", [])]

    def run(self, kills: int) -> str:
        """Live until there were so many kills; then check everything once more. Returns the account."""
        started = time.monotonic()
        while self.kills.total() < kills and not self.wrong:
            self.life()
        left = self.forker.drain()
        self.wrong += [f"left at the end: {left}"] * bool(left)
        if not self.wrong:
            self.wrong += self.forker.run("faults.workloads:check", root=self.root, acks=self.acks, keep=KEEP)
        return (
            f"{self.ranks} rank(s), seed {SEED}: {self.kills.total()} kills {dict(self.kills)} in {self.lives} lives "
            f"and {time.monotonic() - started:.0f} s, {len(self.wrong)} violations"
        )


def children_of(pid: int) -> list[int]:
    """The processes that a process started, whichever of its threads did."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


@pytest.mark.slow
def test_random_kills(forker: Forker, tmp_path: Path) -> None:
    soak = Soak(forker, tmp_path, ranks=2, seed=SEED)
    print(soak.run(6))
    assert not soak.wrong, f"seed {SEED}:\n" + "\n".join(soak.wrong)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("ranks", "share"), [(1, 0.6), (2, 0.4)])
def test_many_random_kills(ranks: int, share: float, forker: Forker, tmp_path: Path, record_property: Record) -> None:
    soak = Soak(forker, tmp_path, ranks, SEED)
    told = soak.run(round(share * int(os.environ.get("CKPT_SOAK_KILLS", "500"))))
    print(told)
    record_property("kills", soak.kills.total())
    assert not soak.wrong, f"{told}\n" + "\n".join(soak.wrong)
