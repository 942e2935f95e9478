"""The zip records of a `torch.save` archive, built here so that the position of every payload is known in advance.

Stored (uncompressed) records as torch writes them: names below `archive/`, tensors on 64-byte boundaries, padding in
an extra field "FB", zip64 above 4 GiB. torch never verifies the checksums. Where ours are in an integrity file, they
are 0 here; a file that must do without one has them in its directory, and says so by the record `names.CHECKSUMS`.
"""

from __future__ import annotations

import struct

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
