"""What a simulated rank writes, and its stand-ins for the parts of a save that need torch or another process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from ckpt_component import CheckpointSaveError
from ckpt_component.core.commit.names import MEGATRON, integrity_name
from ckpt_component.core.writing.request import WriteRequest


def content(run: str, step: int, rank: int) -> bytes:
    return f"{run}, step {step}, rank {rank}\n".encode() * 3


class RankWriter:
    """Stands for writer and caller: writes one small file of this rank as a write job does."""

    format = "simulated"
    options = SimpleNamespace(io="buffered")

    def __init__(self, run: str) -> None:
        self._run = run
        self._written = 0

    def index(self, indexes: Sequence[Any]) -> Mapping[str, bytes]:
        return {".metadata": b"%d ranks" % len(indexes)}

    def progress(self) -> int:
        return self._written

    def settle(self) -> None:
        """Nothing of the write is left."""

    def run(self, job: WriteRequest, deadline: float) -> Mapping[str, Any]:
        files, name, folder = job.fs, f"rank_{job.rank}", job.attempt.staging
        data = content(self._run, MEGATRON.step(os.path.basename(job.attempt.target)) or 0, job.rank)
        try:
            fd = files.create(os.path.join(folder, name))
            for offset in range(0, len(data), 20):
                part = memoryview(data)[offset : offset + 20]
                files.write(fd, [part], offset)
                self._written += len(part)
            files.sync(fd)
            files.close(fd)
            files.write_new(os.path.join(folder, integrity_name(job.rank)), b"{}")
            files.sync_folder(folder)
        except OSError as error:  # the attempt was given up, and deleted
            raise CheckpointSaveError(f"{folder}: {error}", error.errno) from error
        entries = [{"name": name, "size": len(data)}, {"name": integrity_name(job.rank), "size": 2}]
        result = {"rank": job.rank, "files": entries, "bytes": len(data), "seconds": 0.0, "io": "buffered"}
        return {**result, "sums": [], "shared": 0, "copied": []}


def snapshot() -> Any:
    """One that was taken, of a structure that stays."""
    staged = Future[None]()
    staged.set_result(None)
    encoded = SimpleNamespace(
        file_bytes=60, table=SimpleNamespace(number=1), rank_index=lambda: {"items": 1}, object_blobs=()
    )
    layout = SimpleNamespace(payload_bytes=60)
    return SimpleNamespace(
        encoded=encoded,
        staged=staged,
        copied=staged,
        layout=layout,
        staged_at=0.0,
        began_at=0.0,
        planned_at=0.0,
        source=None,
        unchanged=None,
    )
