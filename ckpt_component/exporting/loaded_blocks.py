"""The bytes of tensors of checkpoints that only torch can read: one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..core.formats import Catalogue, Entry
from ..core.image.arena import tensor_bytes
from ..core.state import objects
from ..loading import Reader
from ..loading.source import Request
from .blocks import BLOCK_BYTES, TensorBlocks


class LoadedBlocks(TensorBlocks):
    """Reads tensors as a load does, for checkpoints of other programs and files of `torch.save`.

    Args:
        catalogue: The checkpoint.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        super().__init__(catalogue, ())
        self._source = Reader(options=catalogue.storage.options).open(catalogue.path)

    def of(self, entry: Entry) -> Iterator[memoryview]:
        """As `TensorBlocks.of`; one whole tensor is in memory."""
        value = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        self._source.read_tensors([Request.into(entry.key, value)])
        data = tensor_bytes(value)
        for start in range(0, len(data), BLOCK_BYTES):
            yield data[start : start + BLOCK_BYTES]

    def item(self, entry: Entry) -> bytes:
        """As `TensorBlocks.item`."""
        value = self._source.read_objects([entry.key])[entry.key]
        return objects.dump(objects.encode(value, entry.key))
