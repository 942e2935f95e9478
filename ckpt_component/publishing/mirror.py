"""The mirror: the publisher's copy of the newest published weights, a Hugging Face folder on a disk of this host.

Its bytes are those that receivers have, so a delta is what differs from it. They live in the page cache, and nothing
waits until they are on the disk: the checksums of its tensors are kept beside them and compared when they are read, so
that a mirror that a power cut, or anybody, has damaged is noticed before a delta is published.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from ..core.commit.liveness import FolderLock
from ..core.storage.checksum import find_checksum
from ..core.storage.files import FileStorage
from ..core.storage.new_names import NEW_PREFIX
from ..core.storage.storage import Storage
from ..errors import CheckpointCorruptError, CheckpointExistsError
from ..exporting.blocks import BLOCK_BYTES
from ..exporting.export import ExportOptions, open_blocks, selected_by, small_files
from ..exporting.export_files import File, Tensor, hugging_face_files, stream_file, tensor_bytes_of
from ..formats import open_index
from .delta import DeltaWriter, TensorDelta, checksum_stream
from .local_copy import STATE, CopyState, read_state


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


logger = logging.getLogger(__name__)
Self = TypeVar("Self", bound="Mirror")

#: Says that a folder is a mirror, whatever else it has.
_MARK = ".ckpt-mirror"
#: The checksum of each tensor, for the version in the state.
_SUMS = ".ckpt-checksums.json"


class Mirror:
    """The mirror of one process. A context manager, which holds the lock on it.

    Args:
        fs: the file system of the mirror
        path: its folder; what is there is replaced

    Attributes:
        state: the version that it has; None: none, or it is not known which

    Raises:
        CheckpointInUseError: another process uses it
        CheckpointExistsError: it is a folder with other files
        CheckpointConfigError: there are no locks
    """

    def __init__(self, fs: FileStorage, path: str) -> None:
        self._fs = copy(fs)
        self._fs.durable = False  # see the top of this file
        self._path = path
        self._lock = FolderLock(self._fs, path)
        self._sums: dict[str, str] | None = None
        self.state: CopyState | None = None

    def __enter__(self: Self) -> Self:
        fs, path = self._fs, self._path
        fs.make_folders(path)
        self._lock.claim(
            f"Another process publishes by the mirror {path}; end it, or name another folder: "
            "checkpoint.publish.mirror=FOLDER.",
            f"The file system of the mirror {path} has no locks; name a folder on a disk of this host: "
            "checkpoint.publish.mirror=FOLDER.",
        )
        try:
            names = [name for name in fs.names(path) if not name.startswith(NEW_PREFIX)]  # left by a kill
            if names and not {_MARK, STATE, _SUMS} & {*names}:
                raise CheckpointExistsError(
                    f"The mirror {path} is a folder with other files ({', '.join(names[:3])}), which would be deleted; "
                    "name another one: checkpoint.publish.mirror=FOLDER."
                )
            if _MARK not in names:
                self._mark()
            state = read_state(fs, path)
            self._sums = {} if state is None else self._read_sums(state)
            self.state = None if self._sums is None else state
        except BaseException:
            self.__exit__()
            raise
        return self

    def _mark(self) -> None:
        """Durably, before anything else is there, so that the folder is known by it after a power cut, too."""
        durable = copy(self._fs)
        durable.durable = True
        durable.sync_folder(os.path.dirname(self._path))  # else one of this name that was just deleted may come back
        durable.write_over(os.path.join(self._path, _MARK), b"")

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def has_files_of(self, weights: WeightFiles) -> bool:
        """Whether it has the same files, with the same tensors at the same places, and equal small files."""
        fs, path = self._fs, self._path
        constants = {file.name: (file.size, file.constants) for file in weights.files}
        if any(fs.size(os.path.join(path, name)) != size for name, (size, _) in constants.items()):
            return False
        for name, (_, pieces) in constants.items():
            with self._opened(name) as fd:
                for position, data in pieces:
                    found = memoryview(bytearray(len(data)))
                    fs.read_held(fd, found, position)
                    if found != data:
                        return False
        for name, data in weights.small.items():
            if fs.size(os.path.join(path, name)) != len(data) or fs.read(os.path.join(path, name), len(data)) != data:
                return False
        return {*constants, *weights.small} == {name for name in fs.names(path) if not name.startswith(".")}

    def forget(self) -> None:
        """Before the first change: from now on it is not known which version it has."""
        self.state = None
        for name in (STATE, _SUMS):
            if self._fs.size(os.path.join(self._path, name)) is not None:
                self._fs.unlink(os.path.join(self._path, name))
        self._fs.sync_folder(self._path)

    def replace(self, weights: WeightFiles) -> None:
        """Have these weights, whatever it had.

        Raises:
            CheckpointCorruptError: the checkpoint is damaged
            OSError: the mirror cannot be written
        """
        self.forget()
        for name in filter(_MARK.__ne__, self._fs.names(self._path)):
            path = os.path.join(self._path, name)
            self._fs.remove_tree(path) if self._fs.is_real_folder(path) else self._fs.unlink(path)
        sums = dict[str, str]()

        def read(tensor: Tensor) -> Iterator[memoryview]:
            checksum = checksum_stream()
            for block in weights.read(tensor):
                checksum.update(block)
                yield block
            sums[tensor.name] = checksum.hexdigest()

        for file in weights.files:
            stream_file(self._fs, os.path.join(self._path, file.name), file, read)
        for name, data in weights.small.items():
            self._fs.write_new(os.path.join(self._path, name), data)
        self._sums = sums

    def update(self, weights: WeightFiles, encoding: str, writer: DeltaWriter) -> bool:
        """Have these weights, in the same files, and write what changes.

        Args:
            weights: the weights
            encoding: of the changes
            writer: takes the changes

        Returns:
            Whether these are the changes of the version that the state names; if not, the mirror was damaged.

        Raises:
            CheckpointCorruptError: the checkpoint is damaged
            OSError: the mirror or the changes cannot be written
        """
        known, sums = self._sums or {}, dict[str, str]()
        self.forget()
        old, is_right = memoryview(bytearray(BLOCK_BYTES)), True
        for file in weights.files:
            with self._opened(file.name) as fd:
                for tensor, position in file.places:
                    delta = TensorDelta(encoding, tensor.nbytes)
                    for block in weights.read(tensor):
                        if len(block) > len(old):
                            old = memoryview(bytearray(len(block)))
                        before = old[: len(block)]
                        self._fs.read_held(fd, before, position)
                        if delta.add(block, before):
                            self._fs.write(fd, [block], position)
                        position += len(block)
                    encoded = delta.finish()
                    is_right &= known.get(tensor.name) == encoded.base
                    sums[tensor.name] = encoded.checksum
                    writer.add(tensor.name, encoded)
        self._sums = sums
        return is_right

    def copy_of(self, weights: WeightFiles) -> WeightFiles:
        """These weights, which it has, read from its files. What reads them raises CheckpointCorruptError."""
        sums = self._sums or {}
        places = {tensor.name: (file.name, start) for file in weights.files for tensor, start in file.places}
        block = memoryview(bytearray(BLOCK_BYTES))

        def read(tensor: Tensor) -> Iterator[memoryview]:
            (name, start), checksum = places[tensor.name], checksum_stream()
            for offset in range(0, tensor.nbytes, BLOCK_BYTES):
                piece = block[: tensor.nbytes - offset]
                with self._opened(name) as fd:  # nothing is open at the `yield`, from where this may never continue
                    self._fs.read_held(fd, piece, start + offset)
                checksum.update(piece)
                yield piece
            if checksum.hexdigest() != sums.get(tensor.name):
                raise CheckpointCorruptError(f"{self._path} changed after '{tensor.name}' was written to it.")

        return weights._replace(read=read)

    def note(self, state: CopyState) -> None:
        """It has this version, which is committed."""
        content = {"attempt": state.attempt, "tensors": self._sums}
        self._fs.write_over(os.path.join(self._path, _SUMS), json.dumps(content).encode())
        self._fs.write_over(os.path.join(self._path, STATE), state.encode())
        self.state = state

    def _read_sums(self, state: CopyState) -> dict[str, str] | None:
        """The checksums of its tensors; None: those of this version are not there."""
        path = os.path.join(self._path, _SUMS)
        try:
            content = json.loads(self._fs.read(path, self._fs.size(path) or 0))
            return dict[str, str](content["tensors"]) if content["attempt"] == state.attempt else None
        except FileNotFoundError:
            return None
        except (ValueError, LookupError, TypeError) as error:
            logger.warning("%s is damaged (%s), so the next version is whole", path, error)
            return None

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        fd = self._fs.open_again(os.path.join(self._path, name))
        try:
            yield fd
        finally:
            self._fs.close(fd)
