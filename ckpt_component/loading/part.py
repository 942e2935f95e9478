"""The part of a checkpoint below one name, as if it had nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.formats.contents import Contents
from ..core.progress import Progress, no_progress
from ..core.state.paths import key_of
from .source import Request, Source


class PartSource(Source):
    """The values of a checkpoint with one key, or below it. The keys stay as they are.

    Args:
        source: The checkpoint.
        key: The key; it may have no value, and then this is empty.
    """

    def __init__(self, source: Source, key: str) -> None:
        self._source = source
        self.where = source.where
        below, contents = f"{key}.", source.contents
        self.contents = Contents(
            {name: entry for name, entry in contents.tensors.items() if name == key or name.startswith(below)},
            {name: entry for name, entry in contents.objects.items() if name == key or name.startswith(below)},
            [(place, kind) for place, kind in contents.containers if f"{key_of(place)}.".startswith(below)],
        )

    def read_tensors(self, requests: Sequence[Request], progress: Progress = no_progress) -> None:
        """As of the checkpoint."""
        self._source.read_tensors(requests, progress)

    def read_objects(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """As of the checkpoint."""
        return self._source.read_objects(keys)
