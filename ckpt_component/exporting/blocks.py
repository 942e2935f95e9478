"""The bytes of a checkpoint's tensors, block by block and verified; parts of several ranks are put together."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence

from ..catalogue import Catalogue, Entry, Piece
from ..errors import CheckpointCorruptError, CheckpointLoadError
from ..state.dtypes import WIDTHS
from ..storage.checksum import Checksum, ChecksumMissingError, find_checksum, install_text
from ..storage.file_set import FileSet

#: Bytes of a block; a few blocks are all the memory that an export needs.
BLOCK_BYTES = 2 << 20


class TensorBlocks:
    """Reads tensors of a checkpoint. A context manager, which holds the files open.

    All files are opened at the beginning, so that the checkpoint may be deleted meanwhile.

    Args:
        catalogue: The checkpoint.
        entries: The tensors that will be read.
        block_bytes: The most bytes of a block.

    Raises:
        CheckpointCorruptError: A file is missing.
        CheckpointLoadError: A checksum cannot be computed here.
    """

    def __init__(self, catalogue: Catalogue, entries: Sequence[Entry], block_bytes: int = BLOCK_BYTES) -> None:
        self._folder = catalogue.folder
        self._files = FileSet(catalogue.folder)
        self._block = memoryview(bytearray(block_bytes))
        self._scratch = memoryview(bytearray(block_bytes))
        try:
            for name in dict.fromkeys(piece.file for entry in entries for piece in entry.pieces):
                self._files.descriptor(name)
            kinds = {piece.checksum_kind for entry in entries for piece in entry.pieces}
            self._checksums = {kind: _installed(catalogue.path, kind) for kind in kinds if kind is not None}
        except BaseException:
            self.close()
            raise

    def of(self, entry: Entry) -> Iterator[memoryview]:
        """The bytes of a tensor, in blocks of whole elements. A block is valid until the next one.

        Raises:
            CheckpointCorruptError: The stored bytes are damaged; this may come after the last block.
        """
        if not math.prod(entry.shape):
            return
        if len(entry.pieces) > 1:
            yield from self._put_together(entry)
            return
        stream = self._stream(entry, entry.pieces[0])
        while stream.left:
            block = self._block[: min(stream.left, len(self._block))]
            stream.fill(block)
            yield block

    def item(self, entry: Entry) -> bytes:
        """The stored bytes of an object, verified."""
        (piece,) = entry.pieces
        data = bytearray(piece.length)
        self._stream(entry, piece._replace(payload=piece.offset), piece.length).fill(memoryview(data))
        return bytes(data)

    def _put_together(self, entry: Entry) -> Iterator[memoryview]:
        """Blocks of rows. The rows of each part come in the order in which they are stored."""
        shape, width = entry.shape, WIDTHS[entry.dtype]
        rows = [width * math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
        # The first dimension whose rows fit into a block.
        along = next(dimension for dimension, nbytes in enumerate(rows) if nbytes <= len(self._block))
        most = len(self._block) // rows[along]
        parts = [_Part(self._stream(entry, piece), piece, shape, along, width) for piece in entry.pieces]
        for outer in itertools.product(*map(range, shape[:along])):
            here = [part for part in parts if part.covers(outer)]
            for start in range(0, shape[along], most):
                stop = min(start + most, shape[along])
                block = self._block[: (stop - start) * rows[along]]
                for part in here:
                    part.put(block, start, stop, self._scratch)
                yield block

    def _stream(self, entry: Entry, piece: Piece, nbytes: int | None = None) -> _Stream:
        nbytes = WIDTHS[entry.dtype] * math.prod(piece.shape) if nbytes is None else nbytes
        what = f"'{entry.key}' in {os.path.join(self._folder, piece.file)}"
        checksum = None if piece.checksum_kind is None else self._checksums[piece.checksum_kind]
        return _Stream(self._files, piece, nbytes, what, checksum)

    def close(self) -> None:
        """Close the files."""
        self._files.__exit__()

    def __enter__(self) -> TensorBlocks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_blocks(catalogue: Catalogue, tensors: Sequence[Entry], objects: Sequence[Entry] = ()) -> TensorBlocks:
    """What reads these tensors and objects; what only torch can read is read with torch."""
    direct = all(piece.payload is not None for entry in tensors for piece in entry.pieces)
    if direct and (not objects or catalogue.format == "dcp"):
        return TensorBlocks(catalogue, [*tensors, *objects])
    from .loaded_blocks import LoadedBlocks  # needs torch

    return LoadedBlocks(catalogue)


class _Stream:
    """Reads the payload of one item from its beginning to its end, and then compares the checksum of the item."""

    def __init__(self, files: FileSet, piece: Piece, nbytes: int, what: str, checksum: Checksum | None) -> None:
        self._files = files
        self._piece = piece
        self._what = what
        self._position = piece.offset
        self._checksum = None if checksum is None else checksum.stream()
        self._read(memoryview(bytearray((piece.payload or piece.offset) - piece.offset)))
        #: Bytes of the payload that are still to be read.
        self.left = nbytes

    def fill(self, buffer: memoryview) -> None:
        """Read the next bytes of the payload."""
        self._read(buffer)
        self.left -= len(buffer)
        if self.left or self._checksum is None:
            return
        self._read(memoryview(bytearray(self._piece.offset + self._piece.length - self._position)))
        if self._checksum.value() != self._piece.checksum:
            raise CheckpointCorruptError(
                f"{self._what} is damaged: the bytes do not match the checksum taken at the save."
            )

    def _read(self, buffer: memoryview) -> None:
        if not self._files.fill(self._piece.file, buffer, self._position):
            raise CheckpointCorruptError(f"{self._what} is incomplete: the file is too short.")
        self._position += len(buffer)
        if self._checksum is not None:
            self._checksum.update(buffer)


class _Part:
    """Puts the rows of one part into blocks of rows of the whole tensor.

    Args:
        stream: The payload of the part.
        piece: Its place in the tensor.
        shape: The shape of the tensor.
        along: The dimension of the rows.
        width: Bytes of one element.
    """

    def __init__(self, stream: _Stream, piece: Piece, shape: Sequence[int], along: int, width: int) -> None:
        self._stream = stream
        ranges = [range(start, start + size) for start, size in zip(piece.offsets, piece.shape, strict=True)]
        self._outer, self._rows = ranges[:along], ranges[along]
        self._whole_row, self._row = width * math.prod(shape[along + 1 :]), width * math.prod(piece.shape[along + 1 :])
        #: Where the runs of consecutive bytes of a row begin in the whole row, and their length.
        self._runs, self._run = [0], self._row
        if self._row != self._whole_row:
            cut = max(dimension for dimension, size in enumerate(piece.shape) if size != shape[dimension])
            steps = [width * math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
            self._run = piece.shape[cut] * steps[cut]
            self._runs = [
                sum(map(int.__mul__, places, steps[along + 1 :])) + piece.offsets[cut] * steps[cut]
                for places in itertools.product(*ranges[along + 1 : cut])
            ]

    def covers(self, outer: Sequence[int]) -> bool:
        """Whether the part has rows at these positions of the dimensions before."""
        return all(position in places for position, places in zip(outer, self._outer, strict=True))

    def put(self, block: memoryview, start: int, stop: int, scratch: memoryview) -> None:
        """Put the rows that are in [start, stop) into a block that begins with the row `start`."""
        first, last = max(start, self._rows.start), min(stop, self._rows.stop)
        if first >= last:
            return
        if self._row == self._whole_row:
            self._stream.fill(block[(first - start) * self._row : (last - start) * self._row])
            return
        rows = scratch[: (last - first) * self._row]
        self._stream.fill(rows)
        position, run = 0, self._run
        for begin in range((first - start) * self._whole_row, (last - start) * self._whole_row, self._whole_row):
            for at in self._runs:
                block[begin + at : begin + at + run] = rows[position : position + run]
                position += run


def _installed(path: str, kind: str) -> Checksum:
    try:
        return find_checksum(kind)
    except ChecksumMissingError as error:
        raise CheckpointLoadError(
            f"{path} was saved with the checksum {kind}, whose package is not installed here: {install_text(kind)}."
        ) from error
