"""The files of a version that has the changes of the version before: safetensors files with an index."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from typing import Any

from ..core.commit.manifest import data_folder
from ..core.storage.checksum import find_checksum
from ..core.storage.safe_open import is_plain_name, read_failure
from ..core.storage.storage import Storage
from ..errors import CheckpointCorruptError
from ..exporting.export_files import INDEX, WEIGHTS
from ..formats.safetensors import header_of
from .delta import CHECKSUM, COMPRESSION, ENCODINGS, EncodedTensor
from .versions import Version

#: So many compressed bytes are collected for a file; they are all the memory that a version takes.
_SHARD_BYTES = 64 << 20
_OPEN_SHARDS = 2


def version_text(number: int) -> str:
    """A version's number as indexes have it."""
    return f"{number:06d}"


class DeltaWriter:
    """Writes the changes of tensors into files of bounded size.

    Args:
        storage: the storage
        folder: the folder of the files
        encoding: that of the changes
        shard_bytes: a file is full when it has so many compressed bytes; one tensor is never split
    """

    def __init__(self, storage: Storage, folder: str, encoding: str, shard_bytes: int = _SHARD_BYTES) -> None:
        self._storage = storage
        self._folder = folder
        self._encoding = encoding
        self._shard_bytes = shard_bytes
        self._shard = dict[str, tuple[bytes, str]]()
        self._weight_map = dict[str, str]()
        self._entries = list[dict[str, Any]]()
        self._written = 0

    @property
    def nbytes(self) -> int:
        """Compressed bytes so far."""
        return self._written + self._filled

    @property
    def _filled(self) -> int:
        return sum(len(data) for data, _ in self._shard.values())

    def add(self, name: str, tensor: EncodedTensor) -> None:
        """Add the changes of a tensor; without changes it is left out.

        Raises:
            OSError: from the storage
        """
        if tensor.data is None:
            return
        if self._shard and self._filled + len(tensor.data) > self._shard_bytes:
            self._flush()
        self._shard[name] = tensor.data, tensor.checksum

    def close(self, version: int, base: int) -> list[dict[str, Any]]:
        """Write what is left, and the index.

        Args:
            version: the number of this version
            base: that of the version whose changes these are

        Returns:
            Name, size and CRC-32 of each file.

        Raises:
            OSError: from the storage
        """
        if self._shard:
            self._flush()
        metadata = {
            "version": version_text(version),
            "base_version": version_text(base),
            "delta_encoding": self._encoding,
            "compression_format": COMPRESSION,
            "checksum_format": CHECKSUM,
        }
        index = json.dumps({"metadata": metadata, "weight_map": self._weight_map}, indent=2) + "\n"
        self._storage.write_new(os.path.join(self._folder, INDEX), index.encode())
        self._note(INDEX, index.encode())
        return self._entries

    def _flush(self) -> None:
        name = f"{WEIGHTS}-{len(self._entries) + 1:05d}.safetensors"
        rows = [(key, "uint8", (len(data),), len(data)) for key, (data, _) in self._shard.items()]
        header, _ = header_of(rows, {key: checksum for key, (_, checksum) in self._shard.items()})
        pieces = [header, *(data for data, _ in self._shard.values())]
        fd = self._storage.create(os.path.join(self._folder, name), sum(map(len, pieces)))
        try:
            self._storage.write(fd, [memoryview(piece) for piece in pieces], 0)
            self._storage.sync(fd)
            self._storage.drop_cached(fd)
        finally:
            self._storage.close(fd)
        self._note(name, *pieces)
        self._weight_map |= dict.fromkeys(self._shard, name)
        self._shard = {}

    def _note(self, name: str, *pieces: bytes) -> None:
        checksum = find_checksum("crc32").stream()
        for piece in pieces:
            checksum.update(memoryview(piece))
        size = sum(map(len, pieces))
        self._entries.append({"name": name, "size": size, "crc32": checksum.value()})
        self._written += size


class DeltaFiles:
    """Reads the changes of a version; each file is read as a whole, and verified before it is used.

    Thread-safe. Read in the order of `names`, each file is read once.

    Args:
        storage: the storage
        version: a version that is not whole

    Attributes:
        encoding: that of the changes

    Raises:
        CheckpointCorruptError: a file is missing or damaged, or has not what it is to have
        CheckpointUnreadableError: it cannot be read
    """

    def __init__(self, storage: Storage, version: Version) -> None:
        self._storage = storage
        self._folder = data_folder(storage, version.path, version.manifest)
        self._entries = {entry["name"]: entry for entry in version.manifest["files"]}
        self._weight_map, self.encoding = self._read_index(version)
        self._lock = storage.outside.lock()
        #: The files that were read last: threads may still want the end of one when others begin the next.
        self._shards: dict[str, Mapping[str, tuple[memoryview, str]]] = {}

    def names(self) -> list[str]:
        """The tensors that have changed, file by file."""
        return sorted(self._weight_map, key=lambda name: self._weight_map[name])

    def read(self, name: str) -> tuple[memoryview, str]:
        """The changes of a tensor, compressed, and the checksum of its new bytes.

        Raises:
            CheckpointCorruptError: the file is missing or damaged
            CheckpointUnreadableError: it cannot be read
        """
        file = self._weight_map[name]
        with self._lock:
            if file not in self._shards:
                while len(self._shards) >= _OPEN_SHARDS:
                    del self._shards[next(iter(self._shards))]
                self._shards[file] = _tensors_of(os.path.join(self._folder, file), self._read(file))
            shard = self._shards[file]
        if name not in shard:
            raise CheckpointCorruptError(f"{os.path.join(self._folder, file)} does not have '{name}'.")
        return shard[name]

    def _read_index(self, version: Version) -> tuple[dict[str, str], str]:
        path = os.path.join(self._folder, INDEX)
        try:
            content = json.loads(bytes(self._read(INDEX)))
            metadata, weight_map = content["metadata"], dict[str, str](content["weight_map"])
            found = metadata["version"], metadata["base_version"]
            encoding, formats = (
                metadata["delta_encoding"],
                (metadata["compression_format"], metadata["checksum_format"]),
            )
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise CheckpointCorruptError(f"{path} is not the index of changes ({error!r:.200}).") from error
        expected = version_text(version.number), version_text(version.base or 0)
        if found != expected:
            raise CheckpointCorruptError(f"{path} is of the versions {found}, and its manifest of {expected}.")
        if encoding not in ENCODINGS or formats != (COMPRESSION, CHECKSUM):
            raise CheckpointCorruptError(
                f"{path} has the encoding {encoding!r:.50} and the formats {formats!r:.100}, which are not known here."
            )
        for name, file in weight_map.items():
            if not is_plain_name(file) or file not in self._entries:
                raise CheckpointCorruptError(f"{path} has '{name}' in {file!r:.200}, which the manifest does not list.")
        return weight_map, encoding

    def _read(self, name: str) -> memoryview:
        """All bytes of a file, verified; once more past caches if they are damaged."""
        path, entry = os.path.join(self._folder, name), self._entries.get(name)
        if entry is None or "crc32" not in entry:
            raise CheckpointCorruptError(f"{path} is not in the manifest with a checksum.")
        if name == INDEX:
            try:
                data = self._storage.read_verified(path, entry["size"], entry["crc32"])
            except OSError as error:
                raise read_failure(path, error) from error
            if data is None:
                raise CheckpointCorruptError(f"{path} does not match its checksum in the manifest.")
            return memoryview(data)
        content, checksum = memoryview(bytearray(entry["size"])), find_checksum("crc32")
        with self._storage.open_files(self._folder) as files:

            def damage() -> str | None:
                found = files.fill_summed(name, [content], 0, checksum)
                return None if found == entry["crc32"] else "the file"

            if files.verified(name, 0, len(content), damage) is not None:
                raise CheckpointCorruptError(f"{path} does not match its checksum in the manifest.")
        return content


def _tensors_of(path: str, content: memoryview) -> dict[str, tuple[memoryview, str]]:
    """What a file has: the changes of each tensor, and the checksum of its new bytes."""
    try:
        (length,) = struct.unpack_from("<Q", content)
        header = json.loads(bytes(content[8 : 8 + length]))
        checksums, start, tensors = header.pop("__metadata__"), 8 + length, dict[str, tuple[memoryview, str]]()
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if entry["dtype"] != "U8" or not 0 <= begin <= end <= len(content) - start:
                raise ValueError(f"'{name}' has the dtype {entry['dtype']!r:.50} and the offsets {begin}, {end}")
            tensors[name] = content[start + begin : start + end], checksums[name]
        return tensors
    except (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorruptError(f"{path} is not a file of changes ({error!r:.300}).") from error
