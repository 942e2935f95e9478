"""The files of an export, streamed into any storage: their bytes go in order, with a checksum of them on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ..core.storage.checksum import Stream
from ..core.storage.storage import Storage
from .blocks import TensorBlocks
from .casting import caster
from .export_files import File
from .selection import Tensor

#: So often the disk is made to begin with what was written.
_FLUSH_BYTES = 32 << 20


def stream_file(
    storage: Storage,
    path: str,
    file: File,
    read: Callable[[Tensor], Iterable[memoryview]],
    done: Callable[[int], object] = lambda nbytes: None,
    checksum: Stream | None = None,
) -> None:
    """Write a file that must not exist yet, and make it durable.

    Args:
        storage: the storage
        path: where
        file: what is in it
        read: gives the bytes of a tensor in blocks, such as `tensor_bytes_of`
        done: called with the number of bytes of tensors that were written
        checksum: takes all bytes of the file

    Raises:
        CheckpointCorruptError: the checkpoint is damaged
        OSError: from the storage
    """
    flushed = position = 0
    fd = storage.create(path, file.size)
    try:
        for data, is_tensor in _bytes_of(file, read):
            # A storage that streams reads the memory later, and blocks are valid until the next one.
            piece = memoryview(bytes(data)) if storage.streams else data
            storage.write(fd, [piece], position)
            position += len(piece)
            if checksum is not None:
                checksum.update(piece)
            if is_tensor:
                done(len(piece))
            if position - flushed >= _FLUSH_BYTES:
                storage.start_writeback(fd, flushed, position - flushed)
                flushed = position
        storage.sync(fd)
        storage.drop_cached(fd)
    finally:
        storage.close(fd)


def tensor_bytes_of(blocks: TensorBlocks, tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor as the export has them, in blocks that are valid until the next one.

    Raises:
        CheckpointCorruptError: the stored bytes are damaged; this may come after the last block
    """
    cast = caster(tensor.entry.dtype, tensor.dtype)
    for block in blocks.of(tensor.entry):
        yield block if cast is None else cast(block)


def _bytes_of(file: File, read: Callable[[Tensor], Iterable[memoryview]]) -> Iterator[tuple[memoryview, bool]]:
    """The bytes of a file from its beginning to its end, and whether they are of a tensor."""
    pieces: list[tuple[int, bytes | Tensor]] = [
        *file.constants,
        *((position, tensor) for tensor, position in file.places),
    ]
    for _, piece in sorted(pieces, key=lambda entry: entry[0]):
        if isinstance(piece, bytes):
            yield memoryview(piece), False
        else:
            for block in read(piece):
                yield block, True
