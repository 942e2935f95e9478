"""Entries of our own checkpoints, from the rank indexes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import repeat

from ...errors import CheckpointCorruptError
from ..state.coverage import check_cover
from ..state.dtypes import WIDTHS
from ..state.paths import key_of, keys_of
from .entries import Entry, Piece
from .rank_index import NO_CHECKSUM, Part, RankIndex, StoredItem


def entries_of(where: str, ranks: Sequence[RankIndex]) -> dict[str, Entry]:
    """The entries of all ranks: whole tensors, tensors in parts of several ranks, and objects.

    Args:
        where: The checkpoint, for messages.
        ranks: The indexes of all ranks.

    Raises:
        CheckpointCorruptError: The indexes contradict each other, or tensors have holes or overlapping parts.
    """
    entries: dict[str, Entry] = {}
    split: dict[str, dict[tuple[int, ...], Piece]] = {}  # the parts of tensors that have several, by offsets
    for rank in ranks:
        for entry in _tensors(rank):
            first = entries.setdefault(entry.key, entry)
            if first is entry:
                continue
            if (first.dtype, first.shape) != (entry.dtype, entry.shape):
                raise CheckpointCorruptError(
                    f"'{entry.key}' in {where} is {first.dtype} {first.shape} on one rank and {entry.dtype} "
                    f"{entry.shape} on another."
                )
            # The same part can occur twice: tied on one rank and not on another.
            parts = split.setdefault(entry.key, {piece.offsets: piece for piece in first.pieces})
            parts.setdefault(entry.pieces[0].offsets, entry.pieces[0])
        for path, item in rank.objects:
            key = key_of(path)
            entries[key] = Entry(key, path, "object", "", (), item.length, (_piece(item, (), rank.checksum),))
    for key, parts in split.items():
        entries[key] = entries[key]._replace(pieces=tuple(parts.values()))
    for entry in entries.values():
        if len(entry.pieces) > 1 or entry.pieces[0].shape != entry.shape:
            boxes = [(piece.offsets, piece.shape) for piece in entry.pieces]
            check_cover(f"'{entry.key}' in {where}", entry.shape, boxes)
    return entries


def _tensors(rank: RankIndex) -> Iterator[Entry]:
    """One rank's tensors, or parts of tensors, each as an entry of one piece."""
    pieces = pieces_of(rank)
    parts: Sequence[Part | None] | repeat[None] = rank.parts or repeat(None)
    dtypes, nbytes = rank.tensors.dtypes, rank.tensors.nbytes
    for key, path, number, part in zip(keys_of(rank.paths), rank.paths, rank.numbers, parts, strict=False):
        piece = pieces[number]
        if part is None:
            yield Entry(key, path, "tensor", dtypes[number], piece.shape, nbytes[number], (piece,))
            continue
        shape, offsets = part
        size = math.prod(shape) * WIDTHS[dtypes[number]]
        yield Entry(key, path, "tensor", dtypes[number], shape, size, (piece._replace(offsets=offsets),))


def pieces_of(rank: RankIndex) -> list[Piece]:
    """The stored tensors of a rank as pieces, each as if it were a whole one, by number."""
    tensors = rank.tensors
    files = map(tensors.names.__getitem__, tensors.files)
    zeros = map((0,).__mul__, map(len, tensors.shapes))
    places = (files, tensors.offsets, tensors.lengths, tensors.payloads, zeros, tensors.shapes)
    if rank.checksum == NO_CHECKSUM:
        return list(map(Piece, *places, repeat(None), repeat(None)))
    return list(map(Piece, *places, tensors.checksums, repeat(rank.checksum)))


def items_of(rank: RankIndex) -> list[Piece]:
    """All items of a rank, of tensors and of objects."""
    return [*pieces_of(rank), *(_piece(item, (), rank.checksum) for item in rank.extras)]


def _piece(item: StoredItem, offsets: tuple[int, ...], checksum_kind: str) -> Piece:
    return Piece(item.file, item.offset, item.length, item.payload, offsets, item.shape, item.checksum, checksum_kind)
