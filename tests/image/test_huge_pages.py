"""Memory that processes share, mapped in huge pages."""

from __future__ import annotations

import errno
import logging
import mmap
import os
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckpt_component.core import libc, pages as huge_pages
from ckpt_component.core.image.arena import Arena
from ckpt_component.core.pages import (
    HUGE_PAGE,
    ScratchBlock,
    SharedPages,
    address_of,
    make_huge,
    map_sealed,
    map_shared,
)

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
def huge_pages_given() -> None:
    """Skip where the system makes none."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, SIZE)
    memory = map_shared(fd, SIZE)
    code = make_huge(address_of(memory), SIZE)
    os.close(fd)
    if code:
        pytest.skip(f"this system makes no huge pages of a memfd: {os.strerror(code)}")


def mapped(memory: memoryview) -> list[str]:
    """What smaps says of the mappings in which this memory lies."""
    start, found, inside = address_of_any(memory), list[str](), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.partition(" ")[0]
        if not first.endswith(":"):
            begin, end = (int(each, 16) for each in first.split("-"))
            inside = begin < start + memory.nbytes and end > start
        if inside:
            found.append(line)
    return found


def address_of_any(memory: memoryview) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def mapped_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0])


def huge_bytes(memory: memoryview) -> int:
    """How much of it is mapped in huge pages."""
    return sum(int(line.split()[1]) << 10 for line in mapped(memory) if line.startswith("ShmemPmdMapped:"))


@pytest.mark.usefixtures("huge_pages_given")
def test_what_fills_huge_pages_is_made_of_them_and_keeps_its_bytes(fd: int) -> None:
    memory = map_shared(fd, SIZE)
    assert make_huge(address_of(memory), SIZE) == 0
    assert huge_bytes(memory) == 3 * HUGE_PAGE
    assert bytes(memory) == os.pread(fd, SIZE + 1, 0) == DATA


@pytest.mark.usefixtures("huge_pages_given")
def test_a_part_that_has_no_bytes_yet() -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, SIZE)
    memory = map_shared(fd, SIZE)
    assert make_huge(address_of(memory) + HUGE_PAGE, HUGE_PAGE + 100) == 0
    assert os.fstat(fd).st_blocks * 512 == huge_bytes(memory) == HUGE_PAGE
    assert bytes(memory) == bytes(SIZE)
    os.close(fd)


def test_small_memory_is_left_alone() -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, SIZE)
    memory = map_shared(fd, SIZE)
    assert make_huge(address_of(memory), HUGE_PAGE - 1) == 0
    assert os.fstat(fd).st_blocks == 0
    os.close(fd)


@pytest.mark.parametrize("nbytes", [1, mmap.PAGESIZE, HUGE_PAGE, SIZE])
def test_a_mapping_is_shared_and_goes_with_its_last_view(nbytes: int, fd: int) -> None:
    memory = map_shared(fd, nbytes)
    address = address_of_any(memory)
    assert address % HUGE_PAGE == 0 and memory.nbytes == nbytes and bytes(memory) == DATA[:nbytes]
    os.pwrite(fd, b"x", 0)
    assert memory[0] == ord("x")
    memory[0] = ord("y")
    assert os.pread(fd, 1, 0) == b"y"
    view = memory[:1]
    del memory
    assert any("memfd:test" in line for line in mapped(view)) and view[0] == ord("y")
    before = mapped_pages()
    del view
    assert before - mapped_pages() >= (nbytes + HUGE_PAGE) // mmap.PAGESIZE  # and the room around it


def test_a_mapping_to_read_from(fd: int) -> None:
    memory = map_shared(fd, SIZE, writable=False)
    assert memory.readonly and bytes(memory) == DATA
    with pytest.raises(TypeError, match="read-only"):
        memory[0] = 1


def test_only_a_memfd_whose_size_is_sealed_is_mapped_for_reading(fd: int, tmp_path: Path) -> None:
    pages = SharedPages(SIZE)
    memory = map_sealed(pages.fd, SIZE)
    assert memory is not None and memory.readonly and memory.nbytes == SIZE
    assert map_sealed(pages.fd, SIZE + 1) is None and map_sealed(fd, SIZE) is None
    with open(tmp_path / "file", "w+b") as file:
        file.write(DATA)
        assert map_sealed(file.fileno(), 1) is None
    os.close(pages.fd)


def test_what_cannot_be_mapped_is_told_and_leaves_nothing() -> None:
    before = mapped_pages()
    read, write = os.pipe()
    for _ in range(5):
        with pytest.raises(OSError, match="No such device"):
            map_shared(read, SIZE, writable=False)
    os.close(read)
    os.close(write)
    assert mapped_pages() - before < SIZE // mmap.PAGESIZE  # of five of them


@pytest.mark.usefixtures("huge_pages_given")
def test_an_arena_for_another_process_is_in_huge_pages() -> None:
    arena = Arena(SIZE, shared=True)
    try:
        arena.memory[:] = DATA
        assert huge_bytes(arena.memory) == 3 * HUGE_PAGE
        assert os.pread(arena.shared_descriptor(), SIZE, 0) == DATA
        assert os.fstat(arena.shared_descriptor()).st_blocks * 512 == SIZE
    finally:
        arena.close()


@pytest.mark.usefixtures("huge_pages_given")
def test_a_block_to_read_through_is_in_huge_pages() -> None:
    block = ScratchBlock(huge=True)
    assert huge_bytes(block.view) == HUGE_PAGE
    block.close()


@pytest.mark.parametrize("refused", [libc.MADV_POPULATE_WRITE, libc.MADV_COLLAPSE])
@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOMEM])
def test_without_huge_pages_an_arena_has_small_ones_and_says_so(
    refused: int, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def advise(address: int, nbytes: int, advice: int) -> int:
        asked.append(advice)
        # Small pages can be had; only making huge ones of them is refused.
        refuses = advice == refused and (advice == libc.MADV_COLLAPSE or nbytes == mmap.PAGESIZE)
        return code if refuses else 0

    monkeypatch.setattr(huge_pages, "advise", advise)
    caplog.set_level(logging.INFO, logger="ckpt_component")
    arena = Arena(SIZE, shared=True)
    try:
        arena.memory[:] = DATA
        assert os.pread(arena.shared_descriptor(), SIZE, 0) == DATA
        assert refused in asked
        (said,) = caplog.messages
        assert os.strerror(code) in said
    finally:
        arena.close()


def test_without_huge_pages_a_block_has_small_ones_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(huge_pages, "advise", lambda *_: errno.EINVAL)
    caplog.set_level(logging.DEBUG, logger="ckpt_component")
    block = ScratchBlock(huge=True)
    block.view[HUGE_PAGE - 8] = 7
    target = torch.zeros(8, dtype=torch.uint8)
    table = array("q", (target.data_ptr(), 8))
    block.scatter(table.buffer_info()[0], 1, 8, HUGE_PAGE - 8)
    assert target.tolist() == [7] + 7 * [0]
    (said,) = caplog.messages
    assert "Invalid argument" in said
    block.close()
