"""Seeded random kills of a job that keeps its snapshots in memory: a rank, its server, both, torchrun, all ranks.

Each life of the job has another number of ranks than the one before. A rank is killed at any time, or when the ranks
have begun with a snapshot and its server does not have it yet; the others a moment later.

pytest tests/faults/test_recovery_kills.py                               the short form
pytest --run-soak tests/faults/test_recovery_kills.py                    300 kills
CKPT_SOAK_SEED=7 CKPT_RECOVERY_KILLS=50 pytest --run-soak ...            another seed, another number
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from evidence import Record
from faults.recovering import EVERY_STEPS, LEASE, told_by
from faults.test_soak import children_of
from forker import Forker

SEED = int(os.environ.get("CKPT_SOAK_SEED", "4"))
VICTIMS = ("trainer", "early", "keeper", "both", "torchrun", "session")
WORLDS = (2, 3, 4)
#: A restart may wait so long for processes that are gone, in seconds; the least of its `timeouts` is longer.
MOST_WAITED = 5.0
#: Steps that a trainer is ahead of what is whole in memory: the images in flight, one of which never becomes whole if
#: its rank dies before it gives it to its server, and the step that it is in.
AHEAD = 4
PATIENCE_S = 60.0
#: Jobs whose ranks do not meet, in a hundred or so.
MOST_STILLBORN = 3


class Lives:
    """Lives of a job one after the other in one folder, each ended by a kill.

    Args:
        forker: of the session
        folder: empty
        seed: of all choices
    """

    def __init__(self, forker: Forker, folder: Path, seed: int) -> None:
        self.forker, self.folder = forker, folder
        self.choose = random.Random(seed)
        self.root, self.runtime = str(folder / "root"), folder / "runtime"
        self.lives = self.stillborn = 0
        self.kills = Counter[str]()
        self.sources = Counter[str]()
        self.worlds = Counter[int]()
        self.ranks, self.before = WORLDS[0], ""
        self.waited = 0.0
        self.wrong = list[str]()
        #: The newest step that was acknowledged: in memory whose servers live, and on disk; and the one reached.
        self.kept = self.saved = self.reached = 0

    def run(self, kills: int) -> str:
        """Live until there were so many kills, once more to the end, and once until the lease; returns the account."""
        began = time.monotonic()
        self.life("early")  # of three ranks or four
        while self.kills.total() < kills and not self.wrong:
            self.life(self.choose.choice(VICTIMS))
        if not self.wrong:
            self.life("")
            self.wrong += [f"left after a close: {left}" for left in self.forker.drain(PATIENCE_S)]
            self.life("session", lease=3)
        self.wrong += [f"left after the lease: {left}" for left in self.forker.drain(LEASE + PATIENCE_S)]
        if self.runtime.exists():
            self.wrong += [f"left after the lease: {path}" for path in self.runtime.rglob("*")]
        return (
            f"seed {SEED}: {self.kills.total()} kills {dict(self.kills)} in {time.monotonic() - began:.0f} s, back from "
            f"{dict(self.sources)}, ranks {dict(self.worlds)}, {self.stillborn} not started, waited {self.waited:.2f} s at "
            f"most, {len(self.wrong)} violations"
        )

    def life(self, victim: str, lease: int = LEASE) -> None:
        """Start a job, kill at a random time, and look at what it has said; without a victim it ends in peace."""
        self.lives += 1
        number, began = self.lives, time.monotonic()
        self.ranks = ranks = self.choose.choice([each for each in WORLDS if each != self.ranks])
        self.worlds[ranks] += 1
        log = str(self.folder / f"life{number}")
        env = {"CKPT_RUNTIME_DIR": str(self.runtime)}
        one, options = self.choose.randrange(victim == "early", ranks), dict[str, Any]()
        if not victim:
            options["steps"] = 10
        if victim == "early":
            options["dies"] = (one, self.choose.randint(1, 4))
        launcher = self.forker.fork(
            "faults.recovering:launch", env, root=self.root, log=log, ranks=ranks, lease=lease, **options
        )
        if victim:
            self.await_ranks(log, one if victim == "early" else None)
            time.sleep(self.choose.uniform(0, 0.7) * (victim != "early"))
            trainers = [lines[0]["pid"] for lines in told_by(log, ranks) if lines]
            clients = [child for pid in trainers for child in children_of(pid)]
            self.kill(victim, one, launcher, trainers, clients)
            end_session(launcher)
        ended = self.forker.wait(launcher, PATIENCE_S)
        said, who = told_by(log, ranks), f"life {number} ({victim or 'in peace'}, {ranks} ranks)"
        if not all(said):  # torchrun could not start all ranks: nothing of ours has run
            self.stillborn += 1
            if time.monotonic() - began > LEASE / 2:
                self.kept = 0  # the lease of what is in memory may be over
            self.wrong += [f"{who} did not start: {ended.output[-3000:]}"] * (self.stillborn > MOST_STILLBORN)
            return
        wrong = len(self.wrong)
        self.judge(who, said, harmed=victim in ("keeper", "both", ""))
        if len(self.wrong) > wrong or (not victim and ended.code != 0):
            self.wrong.append(f"{who}: exit {ended.code}\n{ended.output[-3000:]}")

    def await_ranks(self, log: str, dies: int | None) -> None:
        """Wait until all ranks train; and until the one that is to die has. Not forever: see what they have said."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            said = told_by(log, self.ranks)
            all_train = all(any("reached" in line for line in lines) for lines in said)
            if all_train and (dies is None or not is_running(said[dies][0]["pid"])):
                return
            time.sleep(0.01)

    def kill(self, victim: str, one: int, launcher: int, trainers: Sequence[int], clients: Sequence[int]) -> None:
        """Kill -9 whom the dice say; `one` is the rank, which has died already if it was to die early."""
        chosen = {
            "early": [],
            "trainer": [*trainers[one : one + 1]],
            "keeper": [*clients[one : one + 1]],
            "both": [*trainers[one : one + 1], *clients[one : one + 1]],
            "torchrun": [launcher],
            "session": [launcher, *trainers],
        }[victim]
        for pid in chosen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.kills[victim] += 1
        time.sleep(self.choose.choice((0.0, 0.3, 1.0)))  # others may notice it, and their servers have what it lacks

    def judge(self, who: str, said: Sequence[Sequence[dict[str, Any]]], *, harmed: bool) -> None:
        """Compare where a life began with what those before it had acknowledged, and take over what it has."""
        began = {line["resumed"] for lines in said for line in lines if "resumed" in line}
        if len(began) != 1:
            self.wrong.append(f"{who}: the ranks began at {sorted(began)}: {[lines[-1:] for lines in said]}")
            return
        (step,) = began
        self.wrong += [f"{who}: {text}" for lines in said for line in lines for text in line.get("wrong", [])]
        # From when all ranks have come until the first one loads, or has nothing to load: all waits are in there.
        asked, loads, back = (
            [line[what] for lines in said for line in lines if what in line] for what in ("asked", "loads", "back")
        )
        waited = min(loads or back) - max(asked)
        self.waited = max(self.waited, waited)
        if waited > MOST_WAITED:
            self.wrong.append(f"{who}: it waited {waited:.1f} s before it began at step {step}")
        self.sources.update(line["source"] for line in said[0] if "source" in line)
        least = max(self.kept, self.saved)
        if step < least:
            self.wrong.append(f"{who}: it began at step {step}, and step {least} was acknowledged")
        if self.kept and self.reached - step > EVERY_STEPS + AHEAD:
            text = f"{who}: it began at step {step}, and step {self.reached} had been reached; {self.before}"
            self.wrong.append(text)
        kept, saved, reached = ([newest(lines, what) for lines in said] for what in ("kept", "saved", "reached"))
        self.before = f"{who} had kept {kept}, saved {saved}, and reached {reached}"
        self.saved = max(self.saved, *saved)
        # A server that its trainer has closed has nothing more, as one that was killed.
        self.kept = 0 if harmed else max(*kept, *saved, step)
        self.reached = min(reached)  # who was not killed goes on for a moment


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def newest(lines: Sequence[dict[str, Any]], what: str) -> int:
    return max((line[what] for line in lines if what in line), default=0)


def end_session(launcher: int) -> None:
    """Kill what is left of a job, as its scheduler does: all processes of its session."""
    for pid in of_session(launcher):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def of_session(session: int) -> Iterator[int]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(name)) == session:
                yield int(name)


@pytest.mark.turns(3)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_kills_lose_nothing_that_is_in_memory(forker: Forker, tmp_path: Path, record_property: Record) -> None:
    lives = Lives(forker, tmp_path, SEED)
    told = lives.run(4)
    print(told)
    record_property("recovery kills", lives.kills.total())
    assert not lives.wrong, f"{told}\n" + "\n".join(lives.wrong)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_random_kills_lose_nothing_that_is_in_memory(
    forker: Forker, tmp_path: Path, record_property: Record
) -> None:
    lives = Lives(forker, tmp_path, SEED)
    told = lives.run(int(os.environ.get("CKPT_RECOVERY_KILLS", "300")))
    print(told)
    record_property("recovery kills", lives.kills.total())
    assert not lives.wrong, f"{told}\n" + "\n".join(lives.wrong)
