"""The files of an export: where the bytes of each tensor go, and the bytes around them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..formats.safetensors import header_of
from .selection import Tensor

#: The name of the weights in a Hugging Face folder.
WEIGHTS = "model"
INDEX = f"{WEIGHTS}.safetensors.index.json"


class File(NamedTuple):
    """One file of an export.

    Attributes:
        name: its name
        places: the tensors with the positions of their bytes, in the order in which they are written
        constants: the bytes around them, by position
    """

    name: str
    places: Sequence[tuple[Tensor, int]]
    constants: Sequence[tuple[int, bytes]]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        ends = [start + tensor.nbytes for tensor, start in self.places]
        return max(ends + [start + len(data) for start, data in self.constants])


def safetensors_file(name: str, tensors: Sequence[Tensor]) -> File:
    """One safetensors file. Of tied tensors it has the first, as transformers and safetensors want it.

    Raises:
        CheckpointStageError: as `header_of`
    """
    aliases = {key: tensor.name for tensor in tensors for key, _ in tensor.tied}
    rows = [(tensor.name, tensor.dtype, tensor.entry.shape, tensor.nbytes) for tensor in tensors]
    header, order = header_of(rows, aliases)
    places, position = [], len(header)
    for number in order:
        places.append((tensors[number], position))
        position += tensors[number].nbytes
    return File(name, places, [(0, header)])


def hugging_face_files(tensors: Sequence[Tensor], max_shard_bytes: int) -> tuple[list[File], Mapping[str, bytes]]:
    """The weights of a Hugging Face folder in files of at most so many bytes, and the index of several.

    A tensor that is larger gets a file of its own.
    """
    shards: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    if len(shards) == 1:
        return [safetensors_file(f"{WEIGHTS}.safetensors", tensors)], {}
    names = [f"{WEIGHTS}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)}, "weight_map": weight_map}
    files = [safetensors_file(name, shard) for name, shard in zip(names, shards, strict=True)]
    return files, {INDEX: (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()}
