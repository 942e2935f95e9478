"""Layout: the position of every byte of a state dict in the files. Computed once per structure by the format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ...state.structure import Relation, Stored, Structure
from ...state.tensors import column_of


class Item(NamedTuple):  # there may be a hundred thousand, and a dataclass is slower to make
    """The location of one stored tensor.

    Attributes:
        stored: index in `Layout.stored`
        file: index in `Layout.files`
        offset: start of the item in its file
        payload: start of the tensor's bytes in the file; the prefix is between `offset` and this
        nbytes: size of the payload
        length: size of the item, which the CRC covers: prefix, payload and suffix
    """

    stored: int
    file: int
    offset: int
    payload: int
    nbytes: int
    length: int


@dataclass(frozen=True)
class ImageFile:
    """A file of the image. It starts at `base` in the arena, a multiple of the page size, for direct I/O.

    `unchanged`: it has only tensors that are expected to keep their values, so later checkpoints may share it.
    """

    name: str
    base: int
    size: int
    unchanged: bool = False


@dataclass(frozen=True, eq=False)
class Layout:
    """The layout of one rank's image.

    Attributes:
        structure: the structure that it was made for
        stored: the tensors to store: those of the structure, unless the format joins overlapping ones
        files: the files whose bytes come from the arena
        items: the stored tensors, ordered by file and offset
        arena_bytes: required size of the arena
        constants: (position in the arena, bytes) that belong to no item, such as a file's header
        around: returns prefix and suffix of an item. None: items are payloads only.
        forget: called when the fixed bytes are in an arena: frees what `around` keeps for it
        relations: relations of the tensors that the format joins, which a state must satisfy to fit this layout
    """

    structure: Structure
    stored: tuple[Stored, ...]
    files: tuple[ImageFile, ...]
    items: Sequence[Item]
    arena_bytes: int
    constants: tuple[tuple[int, bytes], ...] = ()
    around: Callable[[Item], tuple[bytes, bytes]] | None = None
    forget: Callable[[], None] | None = None
    relations: tuple[Relation, ...] = ()

    @cached_property
    def payload_bytes(self) -> int:
        """Number of bytes that staging copies."""
        return sum(item.nbytes for item in self.items)

    @cached_property
    def tensor_of(self) -> list[int]:
        """The tensor number of every item."""
        return [self.stored[item.stored].tensor for item in self.items]

    @cached_property
    def tensor_column(self) -> torch.Tensor:
        """`tensor_of` as an int64 tensor."""
        return column_of(self.tensor_of)

    @cached_property
    def windows(self) -> dict[int, tuple[int, int]]:
        """The windows of the items that have one (`Stored.window`), by item number."""
        windows = {number: self.stored[item.stored].window for number, item in enumerate(self.items)}
        return {number: window for number, window in windows.items() if window is not None}

    @cached_property
    def unchanged(self) -> dict[int, list[int]]:
        """Numbers of the items of each file that later checkpoints may share, by number of the file."""
        numbers: dict[int, list[int]] = {file: [] for file, image in enumerate(self.files) if image.unchanged}
        for number, item in enumerate(self.items) if numbers else ():
            if item.file in numbers:
                numbers[item.file].append(number)
        return numbers

    @cached_property
    def unchanged_keys(self) -> dict[int, tuple[Any, ...]]:
        """For each of these files, what must be equal in two layouts so that equal tensors make equal files."""
        return {file: (self.files[file].size, *map(self._place_of, items)) for file, items in self.unchanged.items()}

    def _place_of(self, number: int) -> tuple[Any, ...]:
        item, structure = self.items[number], self.structure
        entry = self.stored[item.stored]
        shard = structure.shards[entry.tensor]
        part = None if shard is None else (tuple(shard.shape), tuple(shard.offsets))
        return structure.tensor_paths[entry.tensor], entry.dtype, tuple(entry.shape), part, item.offset, item.payload

    def payload_at(self, item: Item) -> int:
        """The position of an item's payload in the arena."""
        return self.files[item.file].base + item.payload

    def fixed_parts(self) -> Iterator[tuple[int, bytes]]:
        """The bytes that are the same in every save: (position in the arena, bytes)."""
        yield from self.constants
        if self.around is None:
            return
        bases = [file.base for file in self.files]
        for item in self.items:
            prefix, suffix = self.around(item)
            start = bases[item.file] + item.offset
            yield start, prefix
            yield start + item.length - len(suffix), suffix
        if self.forget is not None:
            self.forget()
