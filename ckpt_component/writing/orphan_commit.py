"""Finish a save whose trainers are gone: rank 0's writer process commits what all ranks' writers have written.

There is nobody left to ask, so the disk decides: every rank's integrity file in the staging folder, which is written
last and after its data is durable, is that rank's vote (DESIGN 4).
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError
from ..storage.commit import Attempt, abandon, is_over, publish
from ..storage.fs import FsOps
from ..storage.liveness import AttemptLock
from ..storage.names import integrity_name

_POLL_SECONDS = 0.1
_MAX_BYTES = 1 << 30


def finish(
    fs: FsOps,
    job: Mapping[str, Any],
    mine: Mapping[str, Any],
    sidecars: Mapping[str, bytes],
    lock: AttemptLock,
    until: float,
) -> None:
    """Commit, or take the unfinished checkpoint away. Returns when either is done; says which on stderr.

    Args:
        fs: where effects go.
        job: the write request.
        mine: what this rank wrote.
        sidecars: files that belong to the commit.
        lock: this process's lock on the staging folder.
        until: the save's deadline, monotonic seconds.
    """
    attempt = attempt_of(job)
    try:
        if is_over(fs, attempt):
            return
        votes = _votes(fs, attempt.staging, mine, job["world_size"], lock, job["patience"], until)
        if votes is None:
            _say(f"other ranks' writers did not finish, so {attempt.target} was given up")
            abandon(fs, attempt)
            return
        publish(fs, attempt, votes, sidecars, {**job["about"], "committed_by": "writer"}, job["visible"])
    except (CheckpointError, OSError) as error:
        _say(f"{attempt.target} could not be committed: {error}")
        abandon(fs, attempt)
        return
    _say(f"committed {attempt.target}")


def attempt_of(job: Mapping[str, Any]) -> Attempt:
    """The attempt of a write request."""
    return Attempt(job["target"], job["token"], job["owner"], job["atomic_rename"])


def _votes(
    fs: FsOps, staging: str, mine: Mapping[str, Any], world_size: int, lock: AttemptLock, patience: float, until: float
) -> list[Mapping[str, Any]] | None:
    """What every rank wrote; None when a rank's writer is gone without a vote.

    A writer lives while it holds its lock on the folder, or touches its file. Where locks do not reach other hosts, a
    change in the folder is the sign of life.
    """
    found: dict[int, Mapping[str, Any]] = {mine["rank"]: mine}
    heard, changed = time.monotonic(), (0.0, 0.0)
    while True:
        for rank in range(world_size):
            if rank not in found and (vote := _vote(fs, staging, rank)) is not None:
                found[rank] = vote
        if len(found) == world_size:
            return [found[rank] for rank in range(world_size)]
        now, newest = time.monotonic(), (fs.modified(staging), lock.touched_by_others())
        if newest != changed or lock.held_by_others():
            heard, changed = now, newest
        if now - heard > patience or now > until:
            return None
        time.sleep(_POLL_SECONDS)


def _vote(fs: FsOps, staging: str, rank: int) -> Mapping[str, Any] | None:
    """A rank's integrity file as its vote; None while there is none, or half of one."""
    name = integrity_name(rank)
    try:
        data = fs.read(os.path.join(staging, name), _MAX_BYTES)
        files = json.loads(data)["files"]
    except (FileNotFoundError, ValueError):
        return None
    return {"rank": rank, "files": [*files, {"name": name, "size": len(data), "crc32": zlib.crc32(data)}]}


def _say(text: str) -> None:
    """The terminal may be gone with the trainer; the checkpoint is what counts."""
    print(f"ckpt writer: the trainer is gone; {text}", file=sys.stderr)
