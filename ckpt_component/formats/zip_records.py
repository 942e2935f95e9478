"""The bytes around a payload, which turn a tensor's bytes into an archive that `torch.load` reads.

Each stored tensor of a DCP file is a complete archive. Everything in it except the payload depends only on dtype and
shape. The pickle equals that of `torch.save`, byte for byte. Of the other records, these archives contain only those
that loading needs, without padding: 650 bytes per payload instead of 1,560. The difference is 3 % of a state of 20,000
tensors of 1 to 64 KB.
"""

from __future__ import annotations

import functools
import itertools
import pickle
import struct
import sys

import torch

from ..state.structure import contiguous_stride, element_bytes

#: Items and payloads start at multiples of this, so that they are aligned for any dtype.
ITEM_ALIGNMENT = 64
_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
#: Where the CRC-32 of a record is in its directory entry: 4 bytes, little-endian.
CRC_AT = 16
_LIMIT = 0xFFFFFFFF
_MANY = 0xFFFF
_VERSION = 45  # zip64
_DOS_DATE = 0x21  # 1 January 1980


def local_header(name: str, size: int, offset: int, *, aligned: bool = True) -> bytes:
    """The local header of a record at `offset` in the file. With `aligned`, padding aligns the payload after it."""
    encoded = _full_name(name)
    extra = b"" if size < _LIMIT else struct.pack("<2H2Q", 1, 16, size, size)
    if aligned:
        before = offset + _LOCAL.size + len(encoded) + len(extra) + 4
        padding = -before % ITEM_ALIGNMENT
        extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
    short = min(size, _LIMIT)
    head = _LOCAL.pack(b"PK\x03\x04", _VERSION, 0, 0, 0, _DOS_DATE, 0, short, short, len(encoded), len(extra))
    return head + encoded + extra


def central_header(name: str, size: int, offset: int, crc: int = 0) -> bytes:
    """The directory entry of a record whose local header is at `offset`."""
    encoded = _full_name(name)
    large = [value for value in (size, size, offset) if value >= _LIMIT] if max(size, offset) >= _LIMIT else []
    extra = struct.pack(f"<2H{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    short = min(size, _LIMIT)
    fixed = (b"PK\x01\x02", _VERSION, _VERSION, 0, 0, 0, _DOS_DATE, crc, short, short, len(encoded), len(extra))
    return _CENTRAL.pack(*fixed, 0, 0, 0, 0, min(offset, _LIMIT)) + encoded + extra


def end_of_directory(count: int, size: int, offset: int) -> bytes:
    """The end of the file. Before it, `count` directory entries of `size` bytes in total start at `offset`."""
    tail = b""
    if count >= _MANY or size >= _LIMIT or offset >= _LIMIT:
        tail = _END64.pack(b"PK\x06\x06", 44, _VERSION, _VERSION, 0, 0, count, count, size, offset)
        tail += _LOCATOR64.pack(b"PK\x06\x07", 0, offset + size, 1)
    few = min(count, _MANY)
    return tail + _END.pack(b"PK\x05\x06", 0, 0, few, few, min(size, _LIMIT), min(offset, _LIMIT), 0)


def _full_name(name: str) -> bytes:
    return f"archive/{name}".encode()


#: The pickle protocol of `torch.save`.
_PROTOCOL = 2
#: Storage classes by dtype, as in `torch.save`; newer dtypes have none and use untyped storages.
STORAGES = {
    torch.float32: torch.FloatStorage,
    torch.float64: torch.DoubleStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}


@functools.lru_cache(maxsize=1 << 14)
def around_payload(dtype: torch.dtype, shape: torch.Size) -> tuple[bytes, bytes]:
    """The bytes before and after the payload of a contiguous tensor.

    Cached from the layout to the first filled arena: a kilobyte per shape, and models have dozens of shapes.
    """
    pickled, nbytes = tensor_pickle(dtype, shape), element_bytes(dtype, shape)
    start, between, directory = _other_records(len(pickled))
    position = len(start) + len(pickled) + len(between)
    prefix = b"".join((start, pickled, between, local_header("data/0", nbytes, position)))
    entries = directory + central_header("data/0", nbytes, position)
    return prefix, entries + end_of_directory(4, len(entries), len(prefix) + nbytes)


def tensor_pickle(dtype: torch.dtype, shape: torch.Size) -> bytes:
    """The pickle of `torch.save` for a contiguous tensor.

    `pickle.Pickler` would take ten times as long, and there may be 20,000 tensors of different shapes.
    """
    start, before_shape, before_stride, end = _constant_operations(dtype, len(shape) > 0)
    count = shape.numel() * (1 if dtype in STORAGES else dtype.itemsize)
    number = pickle.dumps(count, _PROTOCOL)[2:-1]
    stride = _pickled_tuple(contiguous_stride(shape))
    return b"".join((start, number, before_shape, _pickled_tuple(shape), before_stride, stride, end))


def _pickled_tuple(numbers: tuple[int, ...]) -> bytes:
    """The pickle opcodes of a tuple, without the one that memoizes it."""
    return pickle.dumps(tuple(numbers), _PROTOCOL)[2:-3] if numbers else b")"


@functools.cache
def _constant_operations(dtype: torch.dtype, has_dimensions: bool) -> tuple[bytes, bytes, bytes, bytes]:
    """The opcodes before the size of the storage, before the shape, before the strides, and after them."""
    typed = dtype in STORAGES
    numbers = itertools.count()

    def kept(operation: bytes) -> bytes:
        """An opcode whose result gets the next number in the pickle's memo."""
        return operation + b"q%c" % next(numbers)

    def kept_global(module: str, name: str) -> bytes:
        return kept(f"c{module}\n{name}\n".encode())

    def kept_text(text: bytes) -> bytes:
        return kept(struct.pack("<cI", b"X", len(text)) + text)

    storage = STORAGES.get(dtype, torch.UntypedStorage)
    start = b"".join(
        (
            b"\x80\x02",
            kept_global("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3"),
            b"((",
            kept_text(b"storage"),
            kept_global(storage.__module__, storage.__name__),
            kept_text(b"0"),
            kept_text(b"cpu"),
        )
    )
    before_shape = kept(b"t") + b"QK\x00"
    # An empty tuple is not memoized.
    before_stride, end = (kept(b""), kept(b"")) if has_dimensions else (b"", b"")
    end += b"\x89" + kept_global("collections", "OrderedDict") + kept(b")R")
    if not typed:
        end += kept_global("torch", str(dtype).removeprefix("torch."))
    return start, before_shape, before_stride, end + kept(b"t") + kept(b"R") + b"."


@functools.cache
def _other_records(pickled: int) -> tuple[bytes, bytes, bytes]:
    """The bytes before a pickle of this length, those between it and the payload's record, and their directory."""
    start = local_header("data.pkl", pickled, 0, aligned=False)
    directory = central_header("data.pkl", pickled, 0)
    between = b""
    for name, data in (("byteorder", sys.byteorder.encode()), ("version", b"3\n")):
        position = len(start) + pickled + len(between)
        directory += central_header(name, len(data), position)
        between += local_header(name, len(data), position, aligned=False) + data
    return start, between, directory
