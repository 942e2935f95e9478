"""The files of an export: where each tensor goes, and the bytes around them.

Of tied tensors, files have the first, as transformers and safetensors want it; files of `torch.save` have all names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..errors import CheckpointLoadError
from ..image.safetensors_header import header_of
from ..state.dtypes import SAFETENSORS
from .selection import Tensor


class File(NamedTuple):
    """One file of an export.

    Attributes:
        name: Its name.
        places: The tensors with the positions of their bytes, in the order in which they are written.
        constants: Bytes before and between them, by position.
        end: The position after the last tensor.
        closing: Returns the bytes after that, from the CRC-32 of each tensor; None: there are none.
    """

    name: str
    places: Sequence[tuple[Tensor, int]]
    constants: Sequence[tuple[int, bytes]]
    end: int
    closing: Callable[[Sequence[int]], bytes] | None = None


def safetensors_file(name: str, tensors: Sequence[Tensor]) -> File:
    """One safetensors file.

    Raises:
        CheckpointLoadError: A tensor has a dtype or a name that the format does not have.
    """
    for tensor in tensors:
        if tensor.dtype not in SAFETENSORS:
            raise CheckpointLoadError(
                f"'{tensor.entry.key}' is {tensor.dtype}, which safetensors files do not have; choose other keys, or "
                "export torch."
            )
        if "__metadata__" in (tensor.name, *(key for key, _ in tensor.tied)):
            raise CheckpointLoadError("'__metadata__' is a reserved name in safetensors files; rename the tensor.")
    aliases = {key: tensor.name for tensor in tensors for key, _ in tensor.tied}
    rows = [(tensor.name, tensor.dtype, tensor.entry.shape, tensor.nbytes) for tensor in tensors]
    header, order = header_of(rows, aliases)
    places, position = [], len(header)
    for number in order:
        places.append((tensors[number], position))
        position += tensors[number].nbytes
    return File(name, places, [(0, header)], position)
