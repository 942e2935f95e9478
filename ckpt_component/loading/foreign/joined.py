"""Several checkpoints read as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...core.progress import Progress, no_progress
from ...errors import CheckpointCorruptError
from ..source import Index, Request, Source


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
        self.index = Index()
        self._parts = parts
        self._part_of: dict[str, Source] = {}
        for number, part in enumerate(parts):
            for key, _ in part.index.paths():
                if key in self._part_of:
                    other = self._part_of[key].where
                    raise CheckpointCorruptError(f"'{key}' is stored twice, in {other} and in {part.where}.")
                self._part_of[key] = part
            self.index.objects.update(part.index.objects)
            self.index.containers += part.index.containers
            for key, entry in part.index.tensors.items():
                self.index.tensors[key] = entry._replace(same_as=(number, entry.same_as))

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

    def tied(self, key: str) -> torch.Tensor | None:
        """As of the part that has it."""
        return self._part_of[key].tied(key)
