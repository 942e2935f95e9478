"""The part of a checkpoint below one name, as if it had nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..core.progress import Progress, no_progress
from ..core.state.paths import key_of
from .source import Index, Request, Source


class PartSource(Source):
    """The values of a checkpoint with one key, or below it. The keys stay as they are.

    Args:
        source: The checkpoint.
        key: The key; it may have no value, and then this is empty.
    """

    def __init__(self, source: Source, key: str) -> None:
        self._source = source
        self.where = source.where
        below, index = f"{key}.", source.index
        self.index = Index(
            {name: entry for name, entry in index.tensors.items() if name == key or name.startswith(below)},
            {name: place for name, place in index.objects.items() if name == key or name.startswith(below)},
            [(place, kind) for place, kind in index.containers if f"{key_of(place)}.".startswith(below)],
        )

    def read_tensors(self, requests: Sequence[Request], progress: Progress = no_progress) -> None:
        """As of the checkpoint."""
        self._source.read_tensors(requests, progress)

    def read_objects(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """As of the checkpoint."""
        return self._source.read_objects(keys)

    def tied(self, key: str) -> torch.Tensor | None:
        """As of the checkpoint."""
        return self._source.tied(key)
