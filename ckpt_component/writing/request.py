"""One rank's part of one save: what has to be written, and where. Standard library alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..options import ResolvedTimeouts
from ..storage.commit import Attempt
from ..storage.file_system import file_system
from ..storage.fs import FsOps
from .range_writer import ByteSource
from .write_job import Extra, WriteOptions, WriteTable

if TYPE_CHECKING:
    from ..image.arena import Arena


@dataclass(frozen=True)
class WriteRequest:
    """Write one complete snapshot into the staging folder of an attempt.

    Attributes:
        fs: where effects go; another process makes its own with the same properties.
        attempt: target and staging folder.
        rank: whose files these are.
        world_size: how many ranks write.
        table: the constant part, alike for all saves of a structure.
        table_number: tells the table from others.
        extras: the encoded objects of this save.
        source: the image's bytes.
        options: how to write.
        manifest_fields: plain values for the manifest.
        timeouts: for how long the writer process waits for other ranks where the trainers have died.
        arena: the memory behind `source`, for a caller in another process; None for live tensors.
        sidecars: files that the commit adds, such as `.metadata`; on rank 0, whose writer process commits when the
            trainers have died.
    """

    fs: FsOps
    attempt: Attempt
    rank: int
    world_size: int
    table: WriteTable
    table_number: int
    extras: Sequence[Extra]
    source: ByteSource
    options: WriteOptions
    manifest_fields: Mapping[str, Any]
    timeouts: ResolvedTimeouts
    arena: Arena | None = None
    sidecars: Mapping[str, bytes] | None = None

    def to_dict(self, number: int, deadline: float) -> dict[str, Any]:
        """The header of the frame that asks the writer process for it, as JSON values.

        Args:
            number: of the request.
            deadline: monotonic seconds.
        """
        extras = []
        for extra in self.extras:
            extras.append(
                {"file": extra.file, "offset": extra.offset, "size": extra.data.nbytes, "items": list(extra.items)}
            )
        return {
            "kind": "write",
            "id": number,
            "table": self.table_number,
            "arena": None if self.arena is None else self.arena.number,
            "target": self.attempt.target,
            "token": self.attempt.token,
            "owner": self.attempt.owner,
            "staging": self.attempt.staging,
            "rank": self.rank,
            "world_size": self.world_size,
            "durable": self.fs.durable,
            "atomic_rename": self.fs.atomic_rename,
            "options": asdict(self.options),
            "extras": extras,
            "about": dict(self.manifest_fields),
            "patience": self.timeouts.heartbeat,
            "visible": self.timeouts.visible,
            "seconds": max(deadline - time.monotonic(), 0.0),
        }

    @classmethod
    def from_dict(
        cls, plain: Mapping[str, Any], table: WriteTable, extras: Sequence[Extra], source: ByteSource
    ) -> WriteRequest:
        """The inverse of `to_dict` in the writer process, with what other frames brought."""
        return cls(
            fs=file_system(durable=plain["durable"], atomic_rename=plain["atomic_rename"], process="writer"),
            attempt=Attempt(plain["target"], plain["token"], plain["owner"], plain["atomic_rename"]),
            rank=plain["rank"],
            world_size=plain["world_size"],
            table=table,
            table_number=plain["table"],
            extras=extras,
            source=source,
            options=WriteOptions(**plain["options"]),
            manifest_fields=plain["about"],
            timeouts=ResolvedTimeouts(heartbeat=plain["patience"], visible=plain["visible"]),
        )
