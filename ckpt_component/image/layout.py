"""Layout: where each byte of a state dict goes. Computed once per structure by the writer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from ..memory.int_columns import column_of
from ..state.structure import Relation, Stored, Structure

#: Every item and every file starts at a multiple of this in the image: slots are aligned for any dtype, and whole files
#: for direct I/O.
ITEM_ALIGNMENT = 64


class Item(NamedTuple):  # there may be a hundred thousand, and a dataclass is slower to make
    """Where one stored tensor lies.

    Attributes:
        stored: number in `Layout.stored`.
        file: number in `Layout.files`.
        offset: where the item starts in its file.
        payload: where the tensor's own bytes start in the file; between `offset` and this is the prefix.
        nbytes: how many those are.
        length: all bytes of the item, CRC included over all of them; what is left after the payload is the suffix.
    """

    stored: int
    file: int
    offset: int
    payload: int
    nbytes: int
    length: int


@dataclass(frozen=True)
class ImageFile:
    """A file of the image: `base` is where it starts in the arena, a multiple of the page size."""

    name: str
    base: int
    size: int


@dataclass(frozen=True, eq=False)
class Layout:
    """The whole image of one rank.

    Attributes:
        structure: what it was made for.
        stored: the tensors that are stored; those of the structure, unless the format joins overlapping ones.
        files: the files whose bytes come from the arena.
        items: the stored tensors, ordered by file and offset.
        arena_bytes: how large the arena must be.
        constants: (place in the arena, bytes) that belong to no item, such as a file's header.
        around: gives prefix and suffix of an item. None: items are payloads alone.
        relations: of the tensors that the format joins: it fits a state only as long as they hold.
    """

    structure: Structure
    stored: tuple[Stored, ...]
    files: tuple[ImageFile, ...]
    items: Sequence[Item]
    arena_bytes: int
    constants: tuple[tuple[int, bytes], ...] = ()
    around: Callable[[Item], tuple[bytes, bytes]] | None = None
    relations: tuple[Relation, ...] = ()

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes that staging copies."""
        return sum(item.nbytes for item in self.items)

    @cached_property
    def tensor_of(self) -> list[int]:
        """For every item the number of its tensor."""
        return [self.stored[item.stored].tensor for item in self.items]

    @cached_property
    def tensor_column(self) -> torch.Tensor:
        """`tensor_of` as int64."""
        return column_of(self.tensor_of)

    @cached_property
    def windows(self) -> dict[int, tuple[int, int]]:
        """The windows of items that are not the whole of their tensor, by number."""
        windows = {number: self.stored[item.stored].window for number, item in enumerate(self.items)}
        return {number: window for number, window in windows.items() if window is not None}

    def payload_at(self, item: Item) -> int:
        """Where an item's payload lies in the arena."""
        return self.files[item.file].base + item.payload

    def fixed_parts(self) -> Iterator[tuple[int, bytes]]:
        """What is the same on every save: (place in the arena, bytes)."""
        yield from self.constants
        if self.around is None:
            return
        bases = [file.base for file in self.files]
        for item in self.items:
            prefix, suffix = self.around(item)
            start = bases[item.file] + item.offset
            yield start, prefix
            yield start + item.length - len(suffix), suffix
