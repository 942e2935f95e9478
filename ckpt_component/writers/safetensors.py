"""One `.safetensors` file per rank: tensors only, readable by the safetensors library.

The format is a JSON header and the payloads without gaps. Tied tensors are stored once; the header's metadata maps
their other names to the stored one, as in `safetensors.torch.save_model`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from ..core.formats.safetensors import header_of
from ..core.image.layout import ImageFile, Item, Layout
from ..core.writing.request import EncodedSave
from ..errors import CheckpointStageError
from ..state.paths import key_of
from ..state.shards import CONTEXT
from ..state.structure import Structure
from .base import FormatPlan, Writer, dtype_name, extents_by_bytes, make_table, refuse_parts


def file_name(rank: int) -> str:
    """`checkpoint_<rank>.safetensors`."""
    return f"checkpoint_{rank}.safetensors"


class SafetensorsWriter(Writer):
    """The safetensors format. Refuses, by key, anything but tensors and containers.

    Of a tensor made of tensors it has these alone: what else it is, a target knows.
    """

    format = "safetensors"

    def plan(self, structure: Structure, rank: int) -> FormatPlan:
        """Lay out `checkpoint_<rank>.safetensors`."""
        return SafetensorsPlan(self, structure, file_name(rank))


class SafetensorsPlan(FormatPlan):
    """One safetensors file.

    Args:
        writer: the format
        structure: the structure to lay out
        name: name of the file
    """

    def __init__(self, writer: Writer, structure: Structure, name: str) -> None:
        others = [path for path in structure.object_paths if path[-1] != CONTEXT]
        if others:
            examples = ", ".join(f"'{key_of(path)}'" for path in others[:3])
            more = len(others) - 3
            raise CheckpointStageError(
                f"safetensors files hold tensors only, and {examples}{f' and {more} more' if more > 0 else ''} "
                "are not; save just the model's tensors, or use checkpoint/writer=dcp."
            )
        refuse_parts(structure, "safetensors")
        structure = copy.copy(structure)
        structure.object_paths = []
        stored = structure.stored
        header, order = _header(structure)
        items, size = [], len(header)
        for number in order:
            nbytes = stored[number].nbytes
            items.append(Item(number, 0, size, size, nbytes, nbytes))
            size += nbytes
        file = ImageFile(name, 0, size)
        self.layout = Layout(structure, tuple(stored), (file,), items, size, ((0, header),))
        self._encoded = EncodedSave(make_table(writer, self.layout, extents_by_bytes(self.layout, writer.workers)))

    def encode_objects(self, objects: Sequence[Any]) -> EncodedSave:
        """There are no objects, so the result is always the same."""
        return self._encoded


def _header(structure: Structure) -> tuple[bytes, list[int]]:
    """The header of the file, and the order in which the payloads follow."""
    keys = [key_of(structure.tensor_paths[entry.tensor]) for entry in structure.stored]
    aliases = {
        key_of(structure.tensor_paths[number]): keys[stored]
        for number, stored in enumerate(structure.stored_of)
        if structure.stored[stored].tensor != number
    }
    rows = [
        (key, dtype_name(entry.dtype), entry.shape, entry.nbytes)
        for key, entry in zip(keys, structure.stored, strict=True)
    ]
    return header_of(rows, aliases)
