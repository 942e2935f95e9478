"""Folders of Megatron's `torch_dist` format: a checkpoint of DCP, and common values that all ranks have."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.formats.dcp_metadata import Megatron
from ...core.formats.folder import MEGATRON_COMMON_FILE, MEGATRON_COMMON_KEY
from ...core.formats.index import Contents
from ...core.progress import Progress, no_progress
from ...errors import CheckpointCorruptError
from ..source import Access, Request
from .dcp import StockDcpSource
from .torch_file import StateSource, TorchFileSource

#: The end of the key of a ShardedObject: its offsets, and how many there are, in each dimension.
_SHARD = re.compile(r"/shard_[\d.]+_[\d.]+$")


class MegatronSource(StockDcpSource):
    """The sharded values under Megatron's keys, and beside them the common values as a nested dict.

    Args:
        index: the checkpoint
        access: how it is read

    Raises:
        CheckpointCorruptError: a file is damaged, or the two parts have a key in common
        CheckpointUnreadableError: a file cannot be read
        CheckpointLoadError: the common values are not a dict
    """

    def __init__(self, index: Megatron, access: Access) -> None:
        super().__init__(index, access)
        self._common = common = self._open_common(index)
        sharded = index.sharded
        entries = {key: entry for key, entry in sharded.entries().items() if key != MEGATRON_COMMON_KEY}
        for key, entry in common.contents.entries().items():
            if key in entries:
                raise CheckpointCorruptError(f"'{key}' is stored twice, in {self.where} and in {common.where}.")
            entries[key] = entry
        self.contents = Contents.of(entries.values(), sharded.containers + common.contents.containers)

    def _open_common(self, index: Megatron) -> StateSource:
        if MEGATRON_COMMON_KEY in index.sharded.objects:
            value = _data(MEGATRON_COMMON_KEY, self.load(MEGATRON_COMMON_KEY))
            return StateSource(value, f"'{MEGATRON_COMMON_KEY}' in {self.where}")
        if index.has_common_file:
            path = os.path.join(index.folder, MEGATRON_COMMON_FILE)
            return TorchFileSource(index.storage, path, Access(index.storage.open_files, verify=False))
        return StateSource({}, self.where)

    def read_tensors(self, requests: Sequence[Request], progress: Progress = no_progress) -> None:
        """Read both parts."""
        groups: tuple[list[Request], list[Request]] = [], []
        for request in requests:
            groups[request.key in self._common.contents.tensors].append(request)
        super().read_tensors(groups[False], progress)
        self._common.read_tensors(groups[True], progress)

    def read_objects(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """Load the objects of both parts."""
        common = [key for key in keys if key in self._common.contents.objects]
        sharded = super().read_objects([key for key in keys if key not in self._common.contents.objects])
        return {**{key: _data(key, value) for key, value in sharded.items()}, **self._common.read_objects(common)}


def _data(key: str, value: Any) -> Any:
    """The data of a ShardedObject, which Megatron stores as a list of one."""
    if _SHARD.search(key) and isinstance(value, list) and len(value) == 1:
        return value[0]
    return value
