"""The contents of a checkpoint of any format: entries by flat key, each with the pieces of it that are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ..state.paths import Path
from ..storage.storage import Storage


class Piece(NamedTuple):
    """A stored part of a tensor, or an object.

    Attributes:
        file: Name of the file in the catalogue's `folder`.
        offset: Start of the item in the file.
        length: Length of the item, which its checksum covers.
        payload: Offset of the tensor's bytes in the file; None: it is only known when the item is opened.
        offsets: Offsets of the part in the whole tensor, one per dimension.
        shape: Shape of the part.
        checksum: Checksum of the item; None: it has none.
        checksum_kind: Its algorithm, such as `crc32`; None without one.
    """

    file: str
    offset: int
    length: int
    payload: int | None
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    checksum: int | None
    checksum_kind: str | None


class Entry(NamedTuple):
    """A tensor or a Python object in a checkpoint.

    Attributes:
        key: Flat key, such as `model.layers.0.weight`.
        path: The parts of the key.
        kind: Whether it is a tensor or another object.
        dtype: Name of the dtype, such as `float32`; empty for an object.
        shape: Shape of the whole tensor.
        nbytes: Bytes of the whole tensor; for an object, of what is stored.
        pieces: The stored parts. Tied tensors have equal pieces.
    """

    key: str
    path: Path
    kind: Literal["tensor", "object"]
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Catalogue:
    """What a checkpoint says it holds.

    Attributes:
        path: The checkpoint, a folder or a file.
        storage: What the files are read with.
        folder: The folder of the files that pieces name.
        format: `dcp`, `safetensors`, `torch_save` or `files` for our own; of other programs `dcp (torch)`, `megatron`,
            `safetensors (file)`, `safetensors (index)` or `torch_save (file)`.
        world_size: Number of ranks that saved it; None: unknown.
        step: The step; None: unknown.
        nbytes: Bytes of all files.
        verified: Whether it has checksums.
        entries: Entries by flat key.
        containers: As `FlatState.containers`, to rebuild the nested form.
        manifest: The manifest; None for the checkpoint of another program.
    """

    path: str
    storage: Storage
    folder: str
    format: str
    world_size: int | None
    step: int | None
    nbytes: int
    verified: bool
    entries: Mapping[str, Entry]
    containers: list[tuple[Path, str]] = field(default_factory=list)
    manifest: Mapping[str, Any] | None = None
