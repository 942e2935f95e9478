"""Finish a save whose trainers have died: rank 0's writer process commits what all ranks' writers have written.

The ranks vote on disk: a rank's vote is its integrity file in the staging folder, which is written last, after the
rank's data is durable. Only rank 0's process waits for the others, and only for those that have not voted, so no two
processes wait for each other.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import CheckpointError
from ..commit.commit import abandon, is_over, publish
from ..commit.liveness import AttemptLock
from ..commit.names import integrity_name
from ..storage.storage import Storage
from .request import WriteRequest, WriteResult

_POLL_SECONDS = 0.1
_MAX_BYTES = 1 << 30


@dataclass
class UndecidedSave:
    """A save that is written but neither committed nor given up.

    Attributes:
        request: this rank's
        result: what this rank wrote
        sidecars: files that the commit adds; compressed, because they are used only if the trainer dies
        lock: this process's lock on the staging folder
        until: the save's deadline, in seconds of the storage's clock
    """

    request: WriteRequest
    result: WriteResult
    sidecars: Mapping[str, bytes]
    lock: AttemptLock
    until: float

    def finish(self, still_writing: Callable[[Collection[int]], Collection[int]] | None = None) -> None:
        """Commit or delete the unfinished checkpoint, and report on stderr which it was.

        Args:
            still_writing: returns which of these ranks may still vote, where that can be asked; None: the lock on the
                folder, and changes in it, show whether any of them may
        """
        request = self.request
        attempt = request.attempt
        try:
            if is_over(attempt):
                return  # the trainer died between the commit and its word of it
            votes = self._votes(still_writing) if request.sees_all else None
            if votes is None:
                _print(f"other ranks' writers did not finish, so {attempt.target} was given up")
                abandon(attempt)
                return
            sidecars = {name: zlib.decompress(data) for name, data in self.sidecars.items()}
            fields = {**request.manifest_fields, "committed_by": "writer"}
            publish(attempt, votes, sidecars, fields, request.timeouts.visible)
        except (CheckpointError, OSError) as error:
            _print(f"{attempt.target} could not be committed: {error}")
            abandon(attempt)
            return
        _print(f"committed {attempt.target}")

    def _votes(
        self, still_writing: Callable[[Collection[int]], Collection[int]] | None
    ) -> list[Mapping[str, Any]] | None:
        """Collect what every rank wrote; None if a rank can no longer vote, or did not in time.

        A writer is alive while it holds its lock on the folder or touches its lock file. Where locks do not work across
        hosts, a change in the folder counts as well. Without any of these, the heartbeat timeout ends the wait.
        """
        request, fs, staging = self.request, self.request.fs, self.request.attempt.staging
        votes: dict[int, Mapping[str, Any]] = {request.rank: self.result}
        alive_at, changed, missing = fs.outside.now(), (0.0, 0.0), set[int]()
        whom = lambda: f"the votes of ranks {sorted(missing)} on {request.attempt.target}"  # noqa: E731
        with fs.outside.waits.on(whom, self.until) as wait:
            while True:
                missing = {*range(request.world_size)} - votes.keys()
                # Ask first: the vote of a rank that has just ended is there by then.
                writing = missing if still_writing is None or not missing else still_writing(missing)
                votes.update({rank: vote for rank in missing if (vote := _vote(fs, staging, rank)) is not None})
                if len(votes) == request.world_size:
                    return [votes[rank] for rank in range(request.world_size)]
                if not missing - votes.keys() <= {*writing}:
                    return None
                now, newest = fs.outside.now(), (fs.modified(staging), self.lock.touched_by_others())
                if newest != changed or self.lock.held_by_others():
                    alive_at, changed = now, newest
                if now - alive_at > request.timeouts.heartbeat or now > self.until:
                    return None
                wait.look()
                fs.outside.sleep(_POLL_SECONDS)


def _vote(fs: Storage, staging: str, rank: int) -> Mapping[str, Any] | None:
    """Read a rank's vote, its integrity file; None while it is missing or incomplete."""
    name = integrity_name(rank)
    try:
        data = fs.read(os.path.join(staging, name), _MAX_BYTES)
        files = json.loads(data)["files"]
    except (FileNotFoundError, ValueError):
        return None
    return {"rank": rank, "files": [*files, {"name": name, "size": len(data), "crc32": zlib.crc32(data)}]}


def _print(text: str) -> None:
    print(f"ckpt writer: the trainer has died; {text}", file=sys.stderr)
