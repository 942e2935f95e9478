"""The bytes of a checkpoint's tensors, block by block and verified; parts of several ranks are put together."""

from __future__ import annotations

import functools
import io
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from operator import mul
from typing import Any

from ..core.spelling import invalid_choice
from ..core.storage.checksum import Checksum
from ..core.storage.file_set import FileSet
from ..errors import CheckpointConfigError, CheckpointCorruptError
from ..formats import Entry, Index, StoredRange
from ..formats.rank_index import checksum_of
from ..state.dtypes import WIDTHS

#: The dtypes that are converted, and to which. Other tensors stay as they are: integers, and 8-bit floats, whose scales
#: are stored apart.
FLOATS = ("float64", "float32", "float16", "bfloat16")

Cast = Callable[[memoryview], memoryview]


def check_dtype(name: str, dtype: str | None) -> None:
    """Refuse what is not a dtype to convert to.

    Args:
        name: name of the setting, for the error message
        dtype: the value; None is valid

    Raises:
        CheckpointConfigError: it is not
    """
    if dtype is None:
        return
    if dtype not in FLOATS:
        raise CheckpointConfigError(invalid_choice(name, dtype, FLOATS))


def cast_dtype(source: str, target: str | None) -> str:
    """The dtype that a tensor has after the conversion."""
    return target if target is not None and source in FLOATS else source


@functools.cache
def caster(source: str, target: str) -> Cast | None:
    """The function that converts a block of whole elements; None: nothing to do."""
    if source == target:
        return None
    import numpy

    def cast(block: memoryview) -> memoryview:
        if source == "bfloat16":  # which numpy does not have: the upper half of a float32
            values = (numpy.frombuffer(block, "<u2").astype("<u4") << 16).view("<f4")
        else:
            values = numpy.frombuffer(block, source)
        with numpy.errstate(over="ignore", invalid="ignore"):  # infinity, as torch
            if target != "float64":
                values = values.astype("float32", copy=False)  # as torch, which has no other way to the halves
            if target == "bfloat16":
                bits = values.view("<u4")
                rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to the nearest, ties to even
                values = numpy.where(numpy.isnan(values), 0x7FC0, rounded).astype("<u2")
            else:
                values = values.astype(target, copy=False)
        return values.view("u1").data

    return cast


#: Bytes of a block; a few blocks are all the memory that an export needs.
BLOCK_BYTES = 2 << 20
#: Bytes that are read ahead of each part of a tensor.
_BUFFER_BYTES = 64 << 10


class TensorBlocks:
    """Reads tensors of a checkpoint. A context manager, which holds the files open.

    All files are opened at the beginning, so that the checkpoint may be deleted while it is read.

    Args:
        index: the checkpoint
        entries: the tensors that will be read
        block_bytes: the most bytes of a block

    Raises:
        CheckpointCorruptError: a file is missing
        CheckpointLoadError: a checksum cannot be computed here
    """

    def __init__(self, index: Index, entries: Sequence[Entry], block_bytes: int = BLOCK_BYTES) -> None:
        self._index, self._folder = index, index.folder
        self._files = index.storage.open_files(index.folder)
        self._block = memoryview(bytearray(block_bytes))
        try:
            pieces = [piece for entry in entries for piece in self._pieces(entry)]
            for name in dict.fromkeys(piece.file for piece in pieces):
                self._files.size(name)
            kinds = {piece.checksum_kind for piece in pieces}
            self._checksums = {kind: checksum_of(index.path, kind) for kind in kinds if kind is not None}
        except BaseException:
            self._files.__exit__()
            raise

    def of(self, entry: Entry) -> Iterator[memoryview]:
        """The bytes of a tensor, in blocks of whole elements. A block is valid until the next one.

        Raises:
            CheckpointCorruptError: the stored bytes are damaged; this may come after the last block
        """
        if not math.prod(entry.shape):
            return
        pieces = self._pieces(entry)
        if len(pieces) > 1:
            yield from self._put_together(entry, pieces)
            return
        stream = self._stream(entry, pieces[0])
        while count := stream.readinto(self._block):
            yield self._block[:count]

    def item(self, entry: Entry) -> bytes:
        """The stored bytes of an object, verified."""
        (piece,) = self._pieces(entry)
        return self._stream(entry, piece._replace(payload=piece.offset), piece.length).readall()

    def _pieces(self, entry: Entry) -> Sequence[StoredRange]:
        return self._index.contents.ranges_at(entry.place)

    def _put_together(self, entry: Entry, pieces: Sequence[StoredRange]) -> Iterator[memoryview]:
        """Blocks of a tensor whose parts are stored apart."""
        width = WIDTHS[entry.dtype]
        parts = [_PartBlocks(self._stream(entry, piece), piece, entry.shape, width) for piece in pieces]
        nbytes = width * math.prod(entry.shape)
        for start in range(0, nbytes, len(self._block)):
            block = self._block[: nbytes - start]
            for part in parts:
                part.put(block, start)
            yield block

    def _stream(self, entry: Entry, piece: StoredRange, nbytes: int | None = None) -> _PayloadStream:
        nbytes = WIDTHS[entry.dtype] * math.prod(piece.shape) if nbytes is None else nbytes
        what = f"'{entry.key}' in {os.path.join(self._folder, piece.file)}"
        checksum = None if piece.checksum_kind is None else self._checksums[piece.checksum_kind]
        return _PayloadStream(self._files, piece, nbytes, what, checksum)

    def __enter__(self) -> TensorBlocks:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.__exit__()


class _PayloadStream(io.RawIOBase):
    """Reads the payload of one item from its beginning to its end, and then compares the checksum of the item."""

    def __init__(self, files: FileSet, piece: StoredRange, nbytes: int, what: str, checksum: Checksum | None) -> None:
        self._files = files
        self._piece = piece
        self._what = what
        self._position = piece.offset
        self._checksum = None if checksum is None else checksum.stream()
        self._read(memoryview(bytearray((piece.payload or piece.offset) - piece.offset)))
        self._left = nbytes

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Read the next bytes of the payload: as many as there are, or fit."""
        count = min(len(buffer), self._left)
        self._read(memoryview(buffer)[:count])
        self._left -= count
        if count and not self._left and self._checksum is not None:
            self._read(memoryview(bytearray(self._piece.offset + self._piece.length - self._position)))
            if self._checksum.value() != self._piece.checksum:
                raise CheckpointCorruptError(
                    f"{self._what} is damaged: the bytes do not match the checksum taken at the save."
                )
        return count

    def _read(self, buffer: memoryview) -> None:
        if not self._files.fill(self._piece.file, buffer, self._position):
            raise CheckpointCorruptError(f"{self._what} is incomplete: the file is too short.")
        self._position += len(buffer)
        if self._checksum is not None:
            self._checksum.update(buffer)


class _PartBlocks:
    """Puts the bytes of one part into blocks of the whole tensor.

    In the tensor, the part is runs of consecutive bytes, in the order in which they are stored.

    Args:
        stream: the payload of the part
        piece: its place in the tensor
        shape: the shape of the tensor
        width: bytes of one element
    """

    def __init__(self, stream: _PayloadStream, piece: StoredRange, shape: Sequence[int], width: int) -> None:
        self._stream = io.BufferedReader(stream, _BUFFER_BYTES)
        steps = [width * math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
        # After the last dimension that is cut, everything is consecutive.
        cut = max((dimension for dimension, size in enumerate(piece.shape) if size != shape[dimension]), default=0)
        self._run = piece.shape[cut] * steps[cut]
        first = sum(map(mul, piece.offsets, steps))
        rows = itertools.product(*map(range, piece.shape[:cut])) if self._run else ()
        self._starts = (first + sum(map(mul, row, steps)) for row in rows)
        self._next_run()

    def _next_run(self) -> None:
        self._at, self._left = next(self._starts, None), self._run

    def put(self, block: memoryview, start: int) -> None:
        """Put what is in a block, whose first byte is the byte `start` of the tensor. Blocks come in order."""
        end = start + len(block)
        while self._at is not None and self._at < end:
            count = min(self._left, end - self._at)
            self._stream.readinto(block[self._at - start : self._at - start + count])
            self._at += count
            self._left -= count
            if not self._left:
                self._next_run()
