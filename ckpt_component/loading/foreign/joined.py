"""Several checkpoints read as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.formats.contents import Contents
from ...core.progress import Progress, no_progress
from ...errors import CheckpointCorruptError
from ..source import Request, Source


class JoinedSource(Source):
    """Parts of one checkpoint that are stored in different ways.

    Args:
        where: The checkpoint's path.
        parts: The parts.

    Raises:
        CheckpointCorruptError: Two of them have the same key.
    """

    def __init__(self, where: str, parts: Sequence[Source]) -> None:
        self.where = where
        self.contents = contents = Contents()
        self._parts = parts
        self._part_of: dict[str, Source] = {}
        for number, part in enumerate(parts):
            for key, _ in part.contents.paths():
                if key in self._part_of:
                    other = self._part_of[key].where
                    raise CheckpointCorruptError(f"'{key}' is stored twice, in {other} and in {part.where}.")
                self._part_of[key] = part
            contents.objects.update(part.contents.objects)
            contents.containers += part.contents.containers
            for key, entry in part.contents.tensors.items():
                contents.tensors[key] = entry._replace(place=(number, entry.place))

    def read_tensors(self, requests: Sequence[Request], progress: Progress = no_progress) -> None:
        """Read from each part what it has."""
        for part in self._parts:
            part.read_tensors([request for request in requests if self._part_of[request.key] is part], progress)

    def read_objects(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """Read from each part what it has."""
        values: dict[str, Any] = {}
        for part in self._parts:
            values.update(part.read_objects([key for key in keys if self._part_of[key] is part]))
        return values
