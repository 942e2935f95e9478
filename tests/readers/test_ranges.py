"""Many pieces of memory filled by one system call, which may do less than it was asked for."""

from __future__ import annotations

import ctypes
import errno
from array import array
from pathlib import Path

import pytest

from ckpt_component.readers import ranges
from ckpt_component.readers.ranges import OpenFiles


def pieces_of(block: bytearray, lengths: list[int]) -> array[int]:
    address = ctypes.addressof(ctypes.c_char.from_buffer(block))
    pieces = array("q")
    for length in lengths:
        pieces.extend((address, length))
        address += length
    return pieces


@pytest.mark.parametrize("most", [None, 7], ids=["whole reads", "short and interrupted reads"])
def test_pieces_are_filled_one_after_the_other(
    most: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(256)) * 20
    (tmp_path / "f").write_bytes(data)
    real, calls = ranges._preadv, 0

    def short(fd: int, address: int, count: int, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            ctypes.set_errno(errno.EINTR)
            return -1
        start, length = (ctypes.c_int64 * 2).from_address(address)
        one = array("q", (start, min(length, most or length)))
        return int(real(fd, one.buffer_info()[0], 1, offset))

    if most is not None:
        monkeypatch.setattr(ranges, "_preadv", short)
    lengths = [0, 1, 0, 0, *([3] * 1500), 100, 0]  # more than one call takes
    block = bytearray(sum(lengths))
    with OpenFiles(str(tmp_path)) as files:
        assert files.fill_memory("f", pieces_of(block, lengths), 11)
        assert bytes(block) == data[11 : 11 + len(block)]
        assert not files.fill_memory("f", pieces_of(block, lengths), len(data) - len(block) + 1)
        assert files.fill_memory("f", pieces_of(block, [0, 0]), 0)
    assert (calls > 0) == (most is not None)
