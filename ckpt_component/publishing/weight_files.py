"""The weights of a checkpoint as the files of a Hugging Face folder, and how they are written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from ..core.storage.checksum import find_checksum
from ..core.storage.files import FileStorage
from ..core.storage.storage import Storage
from ..exporting.export import ExportOptions, open_blocks, selected_by
from ..exporting.export_files import File, hugging_face_files
from ..exporting.hugging_face import small_files
from ..exporting.selection import Tensor
from ..exporting.streaming import stream_file, tensor_bytes_of
from ..formats import open_index


class WeightFiles(NamedTuple):
    """The weights of a checkpoint as the files of a Hugging Face folder.

    Attributes:
        files: the files with tensors
        small: the others
        read: gives the bytes of a tensor in blocks, each valid until the next one
    """

    files: Sequence[File]
    small: Mapping[str, bytes]
    read: Callable[[Tensor], Iterator[memoryview]]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files) + sum(map(len, self.small.values()))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors in the order of the files."""
        return [tensor for file in self.files for tensor, _ in file.places]


@contextmanager
def weight_files(storage: Storage, path: str, options: ExportOptions, fs: FileStorage) -> Iterator[WeightFiles]:
    """The weights of a checkpoint, whose files are open, so that it may be deleted while they are read.

    Args:
        storage: the storage of the checkpoint
        path: the checkpoint
        options: which weights, and in which form
        fs: the file system of the config files

    Raises:
        CheckpointNotFoundError: there is no checkpoint
        CheckpointLoadError: a name fits no key, or there are no config files
        CheckpointStageError: the format does not have a dtype or a name
        CheckpointCorruptError: the checkpoint is damaged
    """
    index = open_index(storage, path)
    # By name: the files are the same, however many ranks saved the checkpoint.
    tensors = sorted(selected_by(options, index).tensors, key=attrgetter("name"))
    small = small_files(fs, options.config_from, options.dtype) if options.config_from else {}
    files, small_index = hugging_face_files(tensors, options.max_shard_bytes)
    with open_blocks(index, [tensor.entry for tensor in tensors]) as blocks:
        yield WeightFiles(files, {**small, **small_index}, partial(tensor_bytes_of, blocks))


def write_weights(storage: Storage, folder: str, weights: WeightFiles) -> list[dict[str, Any]]:
    """Write all files, each durable when the next one begins; returns name, size and CRC-32 of each.

    Args:
        storage: the storage of the folder
        folder: where they go
        weights: the weights

    Raises:
        CheckpointCorruptError: the checkpoint is damaged
        OSError: the files cannot be read or written
    """
    entries, crc32 = list[dict[str, Any]](), find_checksum("crc32")
    for file in weights.files:
        checksum = crc32.stream()
        stream_file(storage, os.path.join(folder, file.name), file, weights.read, checksum=checksum)
        entries.append({"name": file.name, "size": file.size, "crc32": checksum.value()})
    for name, data in weights.small.items():
        storage.write_new(os.path.join(folder, name), data)
        entries.append({"name": name, "size": len(data), "crc32": crc32.of(memoryview(data))})
    return entries
