"""The header of a safetensors file. Imports no torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import CheckpointStageError
from ..state.dtypes import SAFETENSORS, WIDTHS

#: Key, dtype, shape and bytes of a tensor.
Row = tuple[str, str, Sequence[int], int]

_METADATA = "__metadata__"


def header_of(rows: Sequence[Row], aliases: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """The header, padded so that the payloads after it start on a 64-byte boundary, and the order in which they follow.

    Args:
        rows: The tensors. The file has the widest dtypes first, so that every payload is
            aligned without gaps.
        aliases: Other names of tensors, for the metadata, as `safetensors.torch.save_model` has them.

    Raises:
        CheckpointStageError: The format does not have a dtype or a name.
    """
    for key, dtype, *_ in rows:
        if dtype not in SAFETENSORS:
            raise CheckpointStageError(f"'{key}' is {dtype}, which safetensors files do not support; leave it out.")
    if _METADATA in {*aliases, *(key for key, *_ in rows)}:
        raise CheckpointStageError(f"'{_METADATA}' is a reserved name in safetensors files; rename the tensor.")
    entries: dict[str, Any] = {_METADATA: {"format": "pt", **aliases}}
    position = 0
    order = sorted(range(len(rows)), key=lambda number: (-WIDTHS[rows[number][1]], number))
    for number in order:
        key, dtype, shape, nbytes = rows[number]
        end = position + nbytes
        entries[key] = {"dtype": SAFETENSORS[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return struct.pack("<Q", len(text)) + text, order
