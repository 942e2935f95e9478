"""Folders of Megatron's `torch_dist` format: a checkpoint of DCP, and common values that all ranks have."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.formats.dcp_metadata import Megatron
from ...core.formats.folder import MEGATRON_COMMON_FILE, MEGATRON_COMMON_KEY
from ..source import Access, Source
from .dcp import StockDcpSource
from .joined import JoinedSource
from .torch_file import StateSource, TorchFileSource

#: The end of the key of a ShardedObject: its offsets, and how many there are, in each dimension.
_SHARD = re.compile(r"/shard_[\d.]+_[\d.]+$")


def open_megatron(index: Megatron, access: Access) -> Source:
    """Open a folder with the sharded values under Megatron's keys, and beside them the common values as a nested dict.

    Args:
        index: the checkpoint
        access: how it is read

    Raises:
        CheckpointCorruptError: A file is damaged, or the two parts have a key in common.
        CheckpointUnreadableError: A file cannot be read.
        CheckpointLoadError: The common values are not a dict.
    """
    sharded = _ShardedSource(index, access)
    if MEGATRON_COMMON_KEY in sharded.contents.objects:
        where = f"'{MEGATRON_COMMON_KEY}' in {index.where}"
        common: Source = StateSource(_data(MEGATRON_COMMON_KEY, sharded.load(MEGATRON_COMMON_KEY)), where)
        del sharded.contents.objects[MEGATRON_COMMON_KEY]
    elif index.has_common_file:
        unverified = access._replace(verify=False, mapped=False)
        common = TorchFileSource(index.storage, os.path.join(index.folder, MEGATRON_COMMON_FILE), unverified)
    else:
        return sharded
    return JoinedSource(index.where, [sharded, common])


class _ShardedSource(StockDcpSource):
    """The sharded values."""

    def read_objects(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """Load the objects."""
        return {key: _data(key, value) for key, value in super().read_objects(keys).items()}


def _data(key: str, value: Any) -> Any:
    """The data of a ShardedObject, which Megatron stores as a list of one."""
    if _SHARD.search(key) and isinstance(value, list) and len(value) == 1:
        return value[0]
    return value
