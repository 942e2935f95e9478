"""Huge pages for memory that processes share."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_component.image import huge, pages
from ckpt_component.image.arena import Arena
from ckpt_component.image.huge import HUGE_PAGE, collapse

SIZE = 3 * HUGE_PAGE + 5 * mmap.PAGESIZE
DATA = bytes(range(256)) * (SIZE // 256)


@pytest.fixture
def fd() -> Iterator[int]:
    """A memfd with bytes in it."""
    made = os.memfd_create("test")
    os.pwrite(made, DATA, 0)
    yield made
    os.close(made)


@pytest.fixture
def collapses(fd: int) -> None:
    """Skip where the system makes no huge pages."""
    code = collapse(fd, 0, SIZE)
    if code:
        pytest.skip(f"this system makes no huge pages of a memfd: {os.strerror(code)}")


def mapped_huge(fd: int, nbytes: int) -> int:
    """How many bytes of a file lie in huge pages: mapped where they can be, they stand in smaps."""
    room = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held = ctypes.addressof(ctypes.c_char.from_buffer(room))
    address = -(-held // HUGE_PAGE) * HUGE_PAGE
    huge._map(address, nbytes, mmap.PROT_READ, mmap.MAP_SHARED | huge._MAP_FIXED, fd, 0)
    for position in range(0, nbytes, mmap.PAGESIZE):
        ctypes.string_at(address + position, 1)
    found = inside = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name and not name.endswith(":"):
            inside = int(name.partition("-")[0], 16) == address
        elif inside and name == "ShmemPmdMapped:":
            found = int(values[0]) << 10
    return found


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.usefixtures("collapses")
def test_what_fills_huge_pages_is_made_of_them_and_keeps_its_bytes(fd: int) -> None:
    before = mappings()
    assert collapse(fd, 0, SIZE) == 0
    assert mappings() <= before
    assert mapped_huge(fd, SIZE) == 3 * HUGE_PAGE
    assert os.pread(fd, SIZE + 1, 0) == DATA
    assert os.fstat(fd).st_size == SIZE


@pytest.mark.usefixtures("collapses")
def test_a_part_alone() -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, SIZE)
    try:
        assert collapse(fd, HUGE_PAGE, HUGE_PAGE + 100) == 0
        assert mapped_huge(fd, SIZE) == HUGE_PAGE
        assert os.pread(fd, SIZE, 0) == bytes(SIZE)
    finally:
        os.close(fd)


@pytest.mark.usefixtures("collapses")
def test_an_arena_for_another_process_is_in_huge_pages() -> None:
    arena = Arena(SIZE, shared=True)
    try:
        arena.memory[:SIZE] = DATA
        assert mapped_huge(arena.shared_descriptor(), SIZE) == 3 * HUGE_PAGE
        assert os.pread(arena.shared_descriptor(), SIZE, 0) == DATA
    finally:
        arena.close()


@pytest.mark.parametrize("refused", [huge.MADV_POPULATE_WRITE, huge._MADV_COLLAPSE])
@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOMEM])
def test_without_huge_pages_an_arena_has_small_ones_and_says_so(
    refused: int, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def advise(address: int, nbytes: int, advice: int) -> int:
        asked.append(advice)
        return code if advice == refused else 0

    monkeypatch.setattr(huge, "advise", advise)
    caplog.set_level(logging.INFO, logger=pages.__name__)
    before = mappings()
    arena = Arena(SIZE, shared=True)
    try:
        arena.memory[:SIZE] = DATA
        assert os.pread(arena.shared_descriptor(), SIZE, 0) == DATA
        assert refused in asked
        (said,) = caplog.messages
        assert os.strerror(code) in said
    finally:
        arena.close()
    assert mappings() <= before + 1  # what torch and threads keep


def test_small_memory_is_left_alone(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge, "_map", lambda *_: pytest.fail("mapped"))
    assert collapse(fd, 0, HUGE_PAGE - 1) == 0
    assert os.pread(fd, SIZE, 0) == DATA


def test_where_nothing_can_be_mapped_the_reason_is_told(fd: int) -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        collapse(fd, 1, HUGE_PAGE)
