"""The changes of one tensor between two versions, in the format that SGLang's `/pull_weights` reads.

`xor` is the new bytes XOR the old ones, compressed by zstd: the smallest, and to be applied exactly once. `overwrite`
is the positions of the bytes that changed, and their new values: larger, and it may be applied again.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from ..core.spelling import invalid_choice
from ..errors import CheckpointConfigError, CheckpointCorruptError

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
    """Refuse to go on without the packages of the format.

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
