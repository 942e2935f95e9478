"""A stager that takes its state from a checkpoint instead of a dict: each tensor is read while it is written."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..core.image.layout import Layout
from ..core.image.live_source import LiveSource
from ..core.storage.locate import storage_at
from ..errors import first_keys
from ..formats.foreign import RefusedObject
from ..formats.source import MappedSource, Request, Source
from ..loading import Reader
from ..stagers import LiveStager, Snapshot, StatePlan
from ..state.flatten import FlatState, unflatten
from ..state.key_map import KeyMap
from ..state.paths import key_of
from ..state.tensors import tensor_bytes

logger = logging.getLogger(__name__)


class ImportStager(LiveStager):
    """Saves the contents of a checkpoint, of any format that loads; the state given to `save` does not matter.

    Args:
        path: the checkpoint
        rename: as for `KeyMap`
        prefix: as for `KeyMap`
        ignore: as for `KeyMap`
        options: `checkpoint.storage.options`, for a URL
    """

    def __init__(
        self,
        path: str,
        rename: Mapping[str, str] | None = None,
        prefix: str = "",
        ignore: Sequence[str] = (),
        options: Mapping[str, str] | None = None,
    ) -> None:
        self._path = path
        self._reader = Reader(storage_of=partial(storage_at, options=options))
        self._key_map = KeyMap(rename, prefix, ignore)

    def inspect(self, state_dict: Mapping[Any, Any]) -> StatePlan:
        """Open the checkpoint, and inspect what it says it holds.

        Raises:
            CheckpointError: as `Checkpointer.load`
        """
        self._source = source = MappedSource(self._reader.open(self._path, mapped=True), self._key_map)
        source.check_ignored([])
        contents = source.contents
        objects = source.read_objects([*contents.objects])
        refused = [key for key, value in objects.items() if isinstance(value, RefusedObject)]
        if refused:
            text = "%s: %d value(s) are objects that safe loading does not create, and are left out: %s"
            logger.warning(text, self._path, len(refused), first_keys(refused, 5))
        values = {contents.objects[key].path: value for key, value in objects.items() if key not in refused}
        places: dict[Any, torch.Tensor] = {}
        for entry in contents.tensors.values():
            if entry.place not in places:
                # One element of memory, whatever the shape.
                places[entry.place] = torch.empty((), dtype=source.dtype_of(entry), device="cpu").expand(entry.shape)
            values[entry.path] = places[entry.place]
        return super().inspect(unflatten(values, contents.containers))

    def take(self, plan: StatePlan) -> Snapshot:
        """Lay out the state; its tensors are read when they are written."""
        format_plan, flat = self._plan_for(plan)
        source = _ReadSource(format_plan.layout, flat, self._source)
        snapshot = Snapshot(format_plan.layout, format_plan.encode_objects(flat.objects), source)
        snapshot.mark_staged()
        return snapshot


class _ReadSource(LiveSource):
    """Provides the bytes of an image whose tensors are still in a checkpoint; of each thread, one is in memory."""

    def __init__(self, layout: Layout, flat: FlatState, source: Source) -> None:
        super().__init__(layout, flat)
        self._addresses = [None] * len(self._addresses)
        self._keys = [key_of(flat.tensor_paths[number]) for number in layout.tensor_of]
        self._source = source
        self._last = threading.local()

    def _copied(self, number: int) -> memoryview:
        if getattr(self._last, "number", None) != number:
            self._last.number = self._last.value = None  # free the one before
            entry = self._source.contents.tensors[self._keys[number]]
            value = torch.empty(entry.shape, dtype=self._source.dtype_of(entry), device="cpu")
            self._source.read_tensors([Request.into(self._keys[number], value)])
            self._last.number, self._last.value = number, value
        return tensor_bytes(self._last.value)
