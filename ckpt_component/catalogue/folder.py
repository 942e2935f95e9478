"""Folders of other programs: whether one holds a checkpoint, and which files it is made of."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..errors import CheckpointCorruptError
from ..storage.fs import FsOps
from ..storage.names import SINGLE_FILES
from ..storage.safe_open import place_of
from .safetensors import read_weight_map

METADATA = ".metadata"
#: Written last, and only by Megatron's distributed checkpoints.
MEGATRON_MARKER = "metadata.json"
#: Megatron's values that all ranks have: a file, or in newer releases an object.
MEGATRON_COMMON_FILE, MEGATRON_COMMON_KEY = "common.pt", "common_state/shard_0_1"
INDEX = ".safetensors.index.json"
#: Hugging Face's names of the weights, which other files may lie beside.
_WEIGHTS = ("model.safetensors", f"model{INDEX}", "pytorch_model.bin")


def is_readable(names: Sequence[str]) -> bool:
    """Whether a folder of another program with these names holds one checkpoint of a supported format."""
    return METADATA in names or weights_in(names) is not None


def weights_in(names: Sequence[str]) -> str | None:
    """The file to load from a folder with these names, or the index of several; None if there is none or no one."""
    for usual in _WEIGHTS:
        if usual in names:
            return usual
    for endings in (INDEX, SINGLE_FILES[:1], SINGLE_FILES[1:]):
        fitting = [name for name in names if name.endswith(endings)]
        if fitting:
            return fitting[0] if len(fitting) == 1 else None
    return None


class Shards(NamedTuple):
    """Safetensors files that are a checkpoint together: their folder, their names, and the file of each key."""

    folder: str
    names: Sequence[str]
    weight_map: Mapping[str, str]


def shards_of(fs: FsOps, folder: str, name: str) -> Shards:
    """The files that an index of Hugging Face names.

    Args:
        fs: File system to read the index with.
        folder: The folder.
        name: Name of the index in it.

    Raises:
        CheckpointCorruptError: The index is invalid, or names files in several folders.
        CheckpointUnreadableError: The index cannot be read.
    """
    weight_map = read_weight_map(fs, os.path.join(*place_of(folder, name)))
    places = {shard: place_of(folder, shard) for shard in dict.fromkeys(weight_map.values())}
    (base, *others) = dict.fromkeys(place for place, _ in places.values())
    if others:
        raise CheckpointCorruptError(f"{folder} has some of its files in {base} and some in {others[0]}.")
    weight_map = {key: places[shard][1] for key, shard in weight_map.items()}
    return Shards(base, [shard for _, shard in places.values()], weight_map)
