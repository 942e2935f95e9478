"""Small items that are read many at a time: into the right tensors, verified before they land, by short calls too."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import zlib
from array import array
from pathlib import Path

import pytest
import torch

from ckpt_component import CheckpointCorruptError, CheckpointError, CheckpointUnreadableError
from ckpt_component.core import libc
from ckpt_component.core.pages import ScratchBlock
from ckpt_component.core.storage.checksum import Checksum, find_checksum
from ckpt_component.core.storage.open_files import OpenFiles
from ckpt_component.formats.ranges import SMALL_BYTES, CoalescedReads, TensorItems
from ckpt_component.formats.rank_index import item_columns
from ckpt_component.formats.source import Request

#: What lies around a payload, as an archive's header and its end do.
BEFORE, AFTER = 11, 5


class Stored:
    """Files of uint8 tensors, with random bytes around each payload and now and then between items."""

    def __init__(self, folder: Path, lengths: list[int], gaps: list[int], files: int = 2) -> None:
        rng = random.Random(5)
        self.folder = folder
        self.names = [f"f{number}" for number in range(files)]
        self.payloads = [torch.tensor(list(rng.randbytes(length)), dtype=torch.uint8) for length in lengths]
        contents = [bytearray() for _ in self.names]
        self.rows, self.sums = [], []
        for payload, gap in zip(self.payloads, gaps, strict=True):
            number = rng.randrange(files)
            content = contents[number]
            content += rng.randbytes(gap)
            item = rng.randbytes(BEFORE) + bytes(payload.tolist()) + rng.randbytes(AFTER)
            self.rows.append([number, len(content), len(item), len(content) + BEFORE, "uint8", [len(payload)]])
            self.sums.append(zlib.crc32(item))
            content += item
        for name, content in zip(self.names, contents, strict=True):
            (folder / name).write_bytes(content)
        self.sizes = {name: len(content) for name, content in zip(self.names, contents, strict=True)}

    def read(self, numbers: list[int], checksum: Checksum | None) -> tuple[list[torch.Tensor], list[int], int]:
        """The tensors of these items, the places of those that are damaged, and how many runs they were read in."""
        items = TensorItems(item_columns(self.rows, self.sums, self.names, list(self.sizes.values())))
        tensors = [torch.zeros_like(self.payloads[number]) for number in numbers]
        requests = [Request.into(str(place), tensor) for place, tensor in enumerate(tensors)]
        failed = []
        with OpenFiles(str(self.folder)) as files:
            reads = CoalescedReads(items, numbers, requests, checksum, files).ranges
            for each in reads:
                try:
                    each.read()
                except CheckpointUnreadableError:
                    raise
                except CheckpointCorruptError as error:
                    failed.append(int(str(error).split("'")[1]))
        return tensors, failed, len(reads)


def stored(folder: Path, count: int = 3000) -> Stored:
    rng = random.Random(7)
    lengths = [rng.choice([0, 1, 63, 500, 3000]) for _ in range(count - 2)] + [SMALL_BYTES - BEFORE - AFTER] * 2
    gaps = [rng.choice([0, 0, 7, 40_000]) if number % 50 == 0 else 0 for number in range(count)]
    return Stored(folder, lengths, gaps)


@pytest.mark.parametrize("most", [None, 7], ids=["whole calls", "interrupted calls"])
def test_every_payload_lands_in_its_tensor(most: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = libc.preadv, 0

    def interrupted(fd: int, address: int, count: int, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            ctypes.set_errno(errno.EINTR)
            return -1
        return int(real(fd, address, count, offset))

    if most is not None:
        monkeypatch.setattr(libc, "preadv", interrupted)
    files = stored(tmp_path)
    numbers = list(range(len(files.payloads)))
    random.Random(1).shuffle(numbers)
    numbers += numbers[:20]  # what is tied is asked for twice
    targets, wrong, count = files.read(numbers, find_checksum("crc32"))
    assert wrong == []
    assert all(torch.equal(target, files.payloads[number]) for target, number in zip(targets, numbers, strict=True))
    assert count < len(numbers) / 10  # most are neighbours
    assert (calls > 0) == (most is not None)


def test_tiny_neighbours_are_no_more_than_one_call_takes(tmp_path: Path) -> None:
    files = Stored(tmp_path, [8] * 2000, [0] * 2000, files=1)
    targets, wrong, count = files.read(list(range(2000)), find_checksum("crc32"))
    assert wrong == [] and 2 * 2000 / libc.IOV_MAX <= count < 10
    assert all(torch.equal(target, payload) for target, payload in zip(targets, files.payloads, strict=True))


def test_bytes_between_items_are_not_compared(tmp_path: Path) -> None:
    files = Stored(tmp_path, [100] * 50, [7] * 50, files=1)
    targets, wrong, count = files.read(list(range(50)), find_checksum("crc32"))
    assert (wrong, count) == ([], 1)
    assert all(map(torch.equal, targets, files.payloads))


@pytest.mark.parametrize("forged", [-1, 1 << 32, 1 << 63, 1 << 200])
def test_a_sum_that_cannot_be_is_a_sum_that_is_not_met(forged: int, tmp_path: Path) -> None:
    files = Stored(tmp_path, [100] * 50, [0] * 50, files=1)
    files.sums[20] = forged
    _, wrong, _ = files.read(list(range(50)), find_checksum("crc32"))
    assert wrong == [20]


def test_a_target_learns_that_it_was_changed(tmp_path: Path) -> None:
    targets, _, _ = Stored(tmp_path, [10, 0, 20], [0, 0, 0]).read([0, 1, 2], None)
    assert [target._version for target in targets] == [1, 1, 1]


def test_a_damaged_item_is_found_and_its_neighbours_are_left_alone(tmp_path: Path) -> None:
    files = Stored(tmp_path, [100] * 50, [0] * 50, files=1)
    offset, length, payload = (int(str(each)) for each in files.rows[30][1:4])
    for place in (offset, payload + 50, offset + length - 1):
        data = bytearray((tmp_path / "f0").read_bytes())
        data[place] ^= 4
        (tmp_path / "f0").write_bytes(data)
        targets, wrong, count = files.read(list(range(50)), find_checksum("crc32"))
        assert (wrong, count) == ([30], 1)
        assert not any(target.any() for target in targets)
        data[place] ^= 4
        (tmp_path / "f0").write_bytes(data)


def test_a_file_that_ends_before_a_run_names_its_last_item(tmp_path: Path) -> None:
    files = Stored(tmp_path, [100] * 50, [0] * 50, files=1)
    os.truncate(tmp_path / "f0", files.sizes["f0"] - 1)
    targets, wrong, _ = files.read(list(range(50)), None)
    assert wrong == [49]
    assert not any(target.any() for target in targets)


def test_a_copy_that_the_system_refuses_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = ScratchBlock(huge=True)
    try:
        table = array("q", (8, 100))  # an address that is not the process's
        nowhere = table.buffer_info()[0], 1, 100, 0
        with pytest.raises(OSError, match="Bad address: -1 of 100 bytes"):
            block.scatter(*nowhere)
        monkeypatch.setattr(libc, "preadv", lambda *_: 3)
        with pytest.raises(OSError, match="3 of 100 bytes"):
            block.scatter(*nowhere)
    finally:
        block.close()


def test_a_read_that_fails_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    files = Stored(tmp_path, [100] * 50, [0] * 50, files=1)
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointUnreadableError, match="Input/output error"):
        files.read(list(range(50)), None)
    assert os.listdir("/proc/self/fd") == before


def test_no_descriptor_for_a_block_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patched:
        patched.setattr(os, "memfd_create", none_left)
        with pytest.raises(
            CheckpointError, match=r"could not allocate a 2\.1 MB read buffer .*Too many open files.*ulimit -n"
        ):
            ScratchBlock(huge=True)
        patched.undo()
        patched.setattr(os, "posix_fallocate", none_left)
        with pytest.raises(CheckpointError, match="could not allocate"):
            ScratchBlock(huge=True)
    assert os.listdir("/proc/self/fd") == before
