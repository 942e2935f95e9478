"""The changes of one tensor between two versions, in the format that SGLang's `/pull_weights` reads.

`xor` is the new bytes XOR the old ones, compressed by zstd: the smallest, and to be applied exactly once. `overwrite`
is the positions of the bytes that changed, and their new values: larger, and it may be applied again.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

from ..core.commit.manifest import data_folder
from ..core.spelling import invalid_choice
from ..core.storage.checksum import find_checksum
from ..core.storage.safe_open import is_plain_name, read_failure
from ..core.storage.storage import Storage
from ..errors import CheckpointConfigError, CheckpointCorruptError
from ..exporting.export_files import INDEX, WEIGHTS
from ..formats.safetensors import header_of
from .versions import Version

ENCODINGS = ("xor", "overwrite")
COMPRESSION, CHECKSUM = "zstd", "xxh3-128"
#: Fast, and for changes as small as higher levels, with a window and a table that stay in the cache.
_LEVEL, _WINDOW_LOG, _HASH_LOG = 1, 17, 12
#: Bytes that are applied at a time, so that they stay in the cache from the decompression to the checksum.
_BLOCK_BYTES = 2 << 20
#: Positions have four bytes.
MOST_POSITIONS = 1 << 32


class EncodedTensor(NamedTuple):
    """The changes of a tensor.

    Attributes:
        data: the changes, compressed; None: there are none
        checksum: of the new bytes
        base: checksum of the old bytes
    """

    data: bytes | None
    checksum: str
    base: str


def require_codec(why: str) -> None:
    """Refuse to continue without the packages of the format.

    Args:
        why: what needs them, the beginning of a sentence

    Raises:
        CheckpointConfigError: one of them is not installed
    """
    for name in ("numpy", "xxhash", "zstandard"):
        try:
            import_module(name)
        except ImportError as error:
            text = f"{why} needs the package {name}: pip install 'ckpt_component[publish]'"
            raise CheckpointConfigError(text) from error


def can_encode(encoding: str, nbytes: int) -> bool:
    """Whether an encoding has room for the positions of a tensor of so many bytes."""
    return encoding == "xor" or nbytes <= MOST_POSITIONS


class TensorDelta:
    """Encodes the changes of one tensor, block by block.

    Args:
        encoding: one of `ENCODINGS`
        nbytes: bytes of the tensor
    """

    def __init__(self, encoding: str, nbytes: int) -> None:
        if encoding not in ENCODINGS:
            raise ValueError(invalid_choice("encoding", encoding, ENCODINGS, form="{1}"))
        import xxhash

        self._changes: _Xor | _Overwrite = _Xor(nbytes) if encoding == "xor" else _Overwrite()
        self._new, self._old = xxhash.xxh3_128(), xxhash.xxh3_128()

    def add(self, new: memoryview, old: memoryview) -> bool:
        """Add the next bytes of the tensor, and what they were before. Returns whether they differ."""
        self._new.update(new)
        self._old.update(old)
        return self._changes.add(new, old)

    def finish(self) -> EncodedTensor:
        """The changes of the whole tensor."""
        return EncodedTensor(self._changes.finish(), self._new.hexdigest(), self._old.hexdigest())


class _Xor:
    """Compresses new XOR old. Nothing is compressed before the first difference."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._equal = 0
        self._compressor: Any = None
        self._pieces = list[bytes]()
        self._scratch: Any = None

    def add(self, new: memoryview, old: memoryview) -> bool:
        import numpy

        if self._scratch is None or len(self._scratch) < len(new):
            self._scratch = numpy.empty(-(-len(new) // 8) * 8, "u1")
        count = len(new)
        padded = -(-count // 8) * 8
        difference = self._scratch[:count]
        numpy.bitwise_xor(numpy.frombuffer(new, "u1"), numpy.frombuffer(old, "u1"), out=difference)
        self._scratch[count:padded] = 0
        differs = bool(count) and bool(self._scratch[:padded].view("u8").max())
        if self._compressor is None:
            if not differs:
                self._equal += count
                return False
            self._compressor = _compressor(self._nbytes)
            for start in range(0, self._equal, _BLOCK_BYTES):
                self._pieces.append(self._compressor.compress(bytes(min(_BLOCK_BYTES, self._equal - start))))
        self._pieces.append(self._compressor.compress(difference))
        return differs

    def finish(self) -> bytes | None:
        return None if self._compressor is None else b"".join([*self._pieces, self._compressor.flush()])


class _Overwrite:
    """Collects the positions of the bytes that changed, and their new values."""

    def __init__(self) -> None:
        self._position = 0
        self._positions = list[Any]()
        self._values = list[Any]()

    def add(self, new: memoryview, old: memoryview) -> bool:
        import numpy

        values = numpy.frombuffer(new, "u1")
        (places,) = numpy.nonzero(values != numpy.frombuffer(old, "u1"))
        if len(places):
            self._positions.append((places + self._position).astype("<u4"))
            self._values.append(values[places])
        self._position += len(new)
        return bool(len(places))

    def finish(self) -> bytes | None:
        count = sum(map(len, self._positions))
        if not count:
            return None
        compressor = _compressor(4 + 5 * count)
        pieces = [compressor.compress(count.to_bytes(4, "little"))]
        pieces += [compressor.compress(piece) for piece in (*self._positions, *self._values)]
        return b"".join([*pieces, compressor.flush()])


def _compressor(nbytes: int) -> Any:
    import zstandard

    parameters = zstandard.ZstdCompressionParameters.from_level(_LEVEL, window_log=_WINDOW_LOG, hash_log=_HASH_LOG)
    return zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=nbytes)


def apply_delta(encoding: str, data: memoryview, region: memoryview, checksum: str, what: str) -> None:
    """Change the bytes of a tensor to those of the next version, in place.

    Args:
        encoding: one of `ENCODINGS`
        data: the changes, compressed
        region: the bytes of the tensor, as they were in the version before
        checksum: of the new bytes
        what: names the tensor and the file in errors

    Raises:
        CheckpointCorruptError: the changes are damaged, or these are not the bytes that they are changes of. The region
            may have changed.
    """
    import zstandard

    if encoding not in ENCODINGS:
        raise CheckpointCorruptError(f"{what} has changes in the encoding {encoding!r:.100}, which is not known.")
    try:
        found = (_apply_xor if encoding == "xor" else _apply_overwrite)(data, region)
    except (zstandard.ZstdError, ValueError) as error:
        raise CheckpointCorruptError(f"The changes of {what} are damaged: {error}.") from error
    if found != checksum:
        raise CheckpointCorruptError(
            f"{what} does not have the bytes of the new version after its changes: the checksum is {found} for "
            f"{checksum:.40}. The changes are damaged, or are those of another version."
        )


def checksum_stream() -> Any:
    """A checksum of a tensor's bytes, as versions have it: `update` takes them, `hexdigest` gives it."""
    import xxhash

    return xxhash.xxh3_128()


def checksum_of_bytes(data: memoryview) -> str:
    """The checksum of a tensor's bytes, as versions have it."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(data)


def _apply_xor(data: memoryview, region: memoryview) -> str:
    import numpy
    import xxhash
    import zstandard

    _check_size(data, len(region))
    scratch, done, checksum = memoryview(bytearray(min(_BLOCK_BYTES, len(region)))), 0, xxhash.xxh3_128()
    with zstandard.ZstdDecompressor().stream_reader(data) as reader:
        while done < len(region):
            count = reader.readinto(scratch[: len(region) - done])
            if not count:
                raise ValueError(f"they end after {done} of {len(region)} bytes")
            piece = numpy.frombuffer(region[done : done + count], "u1")
            numpy.bitwise_xor(piece, numpy.frombuffer(scratch[:count], "u1"), out=piece)
            checksum.update(region[done : done + count])
            done += count
    return checksum.hexdigest()


def _apply_overwrite(data: memoryview, region: memoryview) -> str:
    import numpy
    import zstandard

    most = 4 + 5 * len(region)
    if zstandard.frame_content_size(data) > most:
        raise ValueError("they are larger than the tensor")
    changes = numpy.frombuffer(zstandard.ZstdDecompressor().decompress(data, most), "u1")
    count = int.from_bytes(changes[:4].tobytes(), "little")
    if len(changes) != 4 + 5 * count:
        raise ValueError(f"they have {len(changes)} bytes for {count} positions")
    positions, values = numpy.frombuffer(changes[4 : 4 + 4 * count].tobytes(), "<u4"), changes[4 + 4 * count :]
    if count and int(positions.max()) >= len(region):
        raise ValueError(f"a position is {int(positions.max())}, and the tensor has {len(region)} bytes")
    numpy.frombuffer(region, "u1")[positions] = values
    return checksum_of_bytes(region)


def _check_size(data: memoryview, nbytes: int) -> None:
    import zstandard

    size = zstandard.frame_content_size(data)
    if size not in (nbytes, -1):  # -1: the frame does not say it
        raise ValueError(f"they are of {size} bytes, and the tensor has {nbytes}")


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
        with self._storage.durable_at_end(fd, cached=False):
            self._storage.write(fd, [memoryview(piece) for piece in pieces], 0)
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
