"""One rank's write job: what a caller has to get done, in the trainer or in another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..storage.commit import Attempt
from ..storage.fs import FsOps

if TYPE_CHECKING:
    from ..formats.base import Sealed
    from ..image.arena import Arena
    from ..writing.progress import Progress
    from ..writing.range_writer import ByteSource
    from ..writing.write_job import WriteOptions


@dataclass(frozen=True)
class WriteJob:
    """Write one snapshot into the staging folder of an attempt.

    Attributes:
        fs: where effects go; another process makes its own with the same properties.
        attempt: target and staging folder.
        rank: whose files these are.
        world_size: how many ranks write.
        sealed: tables and objects.
        sidecars: files that whoever commits has to write, such as `.metadata`; on rank 0, whose writer process commits
            when the trainers are gone.
        source: the image's bytes.
        arena: the memory behind `source`, for a caller in another process; None for live tensors.
        options: how to write.
        about: plain values for the manifest.
        patience: seconds without a sign of life of other ranks' writers before rank 0's gives up that commit.
        visible: seconds until rank 0's sees what they wrote.
        progress: how far the image is complete, for a caller in another process; None where it is.
        stage_seconds: how long it may take until it is.
    """

    fs: FsOps
    attempt: Attempt
    rank: int
    world_size: int
    sealed: Sealed
    sidecars: Mapping[str, bytes]
    source: ByteSource
    arena: Arena | None
    options: WriteOptions
    about: Mapping[str, Any]
    patience: float
    visible: float
    progress: Progress | None = None
    stage_seconds: float = 0.0
