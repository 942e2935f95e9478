"""Reads past the page cache: the same bytes, nothing left in memory, and ordinary reads wherever they cannot be."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckpt_component import CheckpointCorruptError, build_checkpointer
from ckpt_component.core.storage import open_files
from ckpt_component.core.storage.file_set import RangeRead
from ckpt_component.core.storage.open_files import DirectReader, OpenFiles, share_in_memory
from ckpt_component.core.storage.safe_open import is_on_disk, kind_of
from ckpt_component.loading.reader import shares_host

STATE: dict[str, Any] = {
    "large": torch.arange(3_000_000, dtype=torch.int64),
    "small": {str(number): torch.full((5000 + number,), float(number)) for number in range(40)},
}


def zeros() -> dict[str, Any]:
    """A target of the same form."""
    small = {key: torch.zeros_like(value) for key, value in STATE["small"].items()}
    return {"large": torch.zeros_like(STATE["large"]), "small": small}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that has direct reads."""
    for place in (str(tmp_path), os.getcwd()):
        if is_on_disk(place):
            with tempfile.TemporaryDirectory(dir=place, prefix=".past-cache-") as folder:
                yield Path(folder)
            return
    pytest.skip("no folder is on a disk of this computer")


def data_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 1 << 20]


def forget(folder: Path) -> None:
    """Have nothing of a folder in memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(path: Path) -> float:
    """How much of a file is in memory."""
    with open(path, "rb") as file:
        pages = range(0, path.stat().st_size, 4096)
        return sum(open_files.are_cached(file.fileno(), pages)) / len(pages)


def direct_opens(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are opened past the page cache from now on."""
    seen: list[str] = []
    real = os.open

    def opened(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            seen.append(os.readlink(path))
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", opened)
    return seen


def saved(folder: Path, *settings: str) -> Path:
    with build_checkpointer("sync", list(settings)) as checkpointer:
        checkpointer.save(STATE, folder / "ck")
    return folder / "ck"


def check_loaded(state: Any) -> None:
    assert torch.equal(state["large"], STATE["large"])
    assert all(torch.equal(state["small"][key], value) for key, value in STATE["small"].items())


@pytest.mark.parametrize("target", [lambda: None, zeros])
@pytest.mark.parametrize("writer", ["dcp", "safetensors"])
def test_one_rank_leaves_nothing_in_memory(disk: Path, writer: str, target: Callable[[], Any]) -> None:
    path = saved(disk, f"checkpoint/writer={writer}")
    forget(path)
    with build_checkpointer("sync") as checkpointer:
        check_loaded(checkpointer.load(path, target()))
    assert data_files(path) and all(cached_share(file) < 0.1 for file in data_files(path))


def test_several_ranks_of_a_computer_share_what_is_in_memory(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(disk)
    forget(path)
    opens = direct_opens(monkeypatch)
    monkeypatch.setattr("ckpt_component.factory.graph.shares_host", lambda *_: True)
    with build_checkpointer("sync") as checkpointer:
        check_loaded(checkpointer.load(path))
    assert not opens
    assert data_files(path) and all(cached_share(file) > 0.9 for file in data_files(path))


@pytest.mark.parametrize(
    ("world_size", "on_computer", "shares"),
    [(1, None, False), (1, "8", False), (8, "8", True), (8, None, True), (8, "1", False)],
)
def test_who_shares_a_computer(
    world_size: int, on_computer: str | None, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if on_computer is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", on_computer)
    assert shares_host(world_size) is shares


def test_what_is_in_memory_is_read_there(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(disk)
    for file in data_files(path):
        file.read_bytes()
    opens = direct_opens(monkeypatch)
    with build_checkpointer("sync") as checkpointer:
        check_loaded(checkpointer.load(path))
    assert not opens


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_file_of_safetensors_and_one_of_dcp(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed.checkpoint as dcp

    save_file({"large": STATE["large"]}, disk / "one.safetensors")
    dcp.save({"large": STATE["large"]}, checkpoint_id=disk / "dcp", no_dist=True)
    forget(disk)
    opens = direct_opens(monkeypatch)
    with build_checkpointer("sync") as checkpointer:
        for name in ("one.safetensors", "dcp"):
            assert torch.equal(checkpointer.load(disk / name)["large"], STATE["large"])
    assert [os.path.basename(path) for path in opens] == ["one.safetensors", "__0_0.distcp"]


def test_a_flipped_bit_is_found(disk: Path) -> None:
    path = saved(disk)
    (file,) = data_files(path)
    with open(file, "r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 4]))
    forget(path)
    with build_checkpointer("sync") as checkpointer, pytest.raises(CheckpointCorruptError, match=r"'large'.*damaged"):
        checkpointer.load(path)


@contextlib.contextmanager
def direct_reader(folder: Path, fd: int) -> Iterator[DirectReader]:
    reader = DirectReader(str(folder), [fd])
    try:
        yield reader
    finally:
        reader.close()


#: Of a range that is read by direct I/O, at least, and in one piece, at most.
LEAST, MOST = 64 << 10, open_files.MAX_BYTES


@pytest.mark.parametrize("offset", [0, 1, 511, 4095, 4096, 70_001])
@pytest.mark.parametrize("length", [LEAST, LEAST + 1, MOST - 1, MOST, MOST + 4097, 2 * MOST])
def test_any_range(disk: Path, offset: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randint(0, 256, (70_001 + 2 * MOST,), dtype=torch.uint8).numpy().tobytes()
    (disk / "file").write_bytes(data)
    forget(disk)
    opens = direct_opens(monkeypatch)
    buffer = memoryview(bytearray(length + 1))
    with OpenFiles(str(disk), shared=False) as files:
        read = RangeRead("file", offset, 2 * MOST, lambda: found.append(files.fill("file", buffer[:length], offset)))
        found: list[bool] = []
        files.read_all([read])
    assert found == [True] and opens
    assert buffer[:length] == data[offset : offset + length]
    assert not buffer[length]  # nothing is written behind what was asked for


@pytest.mark.parametrize("offset", [0, 1, 511, 4095, 4096, 70_001])
@pytest.mark.parametrize("length", [LEAST, LEAST + 1, 4096 * 100 - 1])
def test_any_range_into_a_block(disk: Path, offset: int, length: int) -> None:
    data = torch.randint(0, 256, (500_000,), dtype=torch.uint8).numpy().tobytes()
    (disk / "file").write_bytes(data)
    fd = os.open(disk / "file", os.O_RDONLY)
    try:
        block = memoryview(mmap.mmap(-1, length + 2 * 4096))
        with direct_reader(disk, fd) as reads:
            assert reads.read(fd, block, offset, length) == length
            assert block[offset % 4096 :][:length] == data[offset : offset + length]
            assert reads.read(fd, block, len(data) - length + 1, length) == length - 1  # the file ends before
            assert reads.read(fd, block, len(data) + 9000, length) == 0
            assert reads.read(fd, block, offset, LEAST - 1) is None
    finally:
        os.close(fd)


@pytest.mark.parametrize("size", [0, 1, 4096, 100_000, 100_352])
def test_the_end_of_a_file(disk: Path, size: int) -> None:
    (disk / "file").write_bytes(bytes(range(1, 252)) * (size // 251) + b"x" * (size % 251))
    data = (disk / "file").read_bytes()
    fd = os.open(disk / "file", os.O_RDONLY)
    block = memoryview(mmap.mmap(-1, LEAST * 2 + 2 * 4096))
    try:
        with direct_reader(disk, fd) as reads:
            assert reads.read(fd, block, 0, LEAST * 2) == size
            assert block[:size] == data
            assert reads.read(fd, block, size, LEAST * 2) == 0
            assert reads.read(fd, block, size + 5000, LEAST * 2) == 0
    finally:
        os.close(fd)


def test_a_direct_read_that_stops_halfway_goes_on_through_the_cache(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(disk)
    forget(path)
    real = os.preadv

    def half(fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        count = real(fd, buffers, offset, flags)
        return count // 8192 * 4096 if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT else count

    opens = direct_opens(monkeypatch)
    monkeypatch.setattr(os, "preadv", half)
    with build_checkpointer("sync", ["checkpoint.verify=off"]) as checkpointer:
        check_loaded(checkpointer.load(path, zeros()))
    assert opens


def test_a_file_that_was_cut_is_told(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (disk / "file").write_bytes(b"x" * 1_500_000)
    forget(disk)
    opens = direct_opens(monkeypatch)
    found = []
    with OpenFiles(str(disk), shared=False) as files:
        buffer = memoryview(bytearray(1_600_000))
        files.read_all([RangeRead("file", 0, 1_600_000, lambda: found.append(files.fill("file", buffer, 0)))])
    assert found == [False] and opens


def refuse_open(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def opened(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", opened)


def refuse_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def read(fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT and offset > 3 << 20:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", read)


@pytest.mark.parametrize("refuse", [refuse_open, refuse_reads])
def test_where_it_fails_reads_are_ordinary_and_one_line_says_so(
    disk: Path,
    refuse: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = saved(disk)
    forget(path)
    with build_checkpointer("sync") as checkpointer, caplog.at_level(logging.INFO):
        refuse(monkeypatch)
        check_loaded(checkpointer.load(path))
    lines = [record.message for record in caplog.records if "page cache" in record.message]
    assert len(lines) == 1 and str(path) in lines[0] and "direct I/O failed" in lines[0]


def test_a_cache_that_cannot_be_looked_at(
    disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(disk)
    forget(path)
    opens = direct_opens(monkeypatch)

    def failing(fd: int, offsets: Sequence[int]) -> list[bool]:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(open_files, "are_cached", failing)
    with build_checkpointer("sync") as checkpointer, caplog.at_level(logging.INFO):
        check_loaded(checkpointer.load(path))
    assert not opens and sum("cannot query the page cache" in record.message for record in caplog.records) == 1


def test_a_folder_of_which_nothing_is_known(
    disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(disk)
    forget(path)

    def failing(folder: str) -> bool:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(open_files, "is_on_disk", failing)
    with build_checkpointer("sync") as checkpointer, caplog.at_level(logging.INFO):
        check_loaded(checkpointer.load(path))
    assert sum("cannot query the page cache" in record.message for record in caplog.records) == 1


def test_no_descriptor_is_left(disk: Path) -> None:
    path = saved(disk)
    with build_checkpointer("sync") as checkpointer:
        forget(path)
        checkpointer.load(path)
        before = sorted(os.listdir("/proc/self/fd"))
        for _ in range(3):
            forget(path)
            checkpointer.load(path)
        assert len(os.listdir("/proc/self/fd")) == len(before)


def test_how_much_is_in_memory(disk: Path) -> None:
    size = 4 << 20
    (disk / "file").write_bytes(b"x" * size)
    forget(disk)
    fd = os.open(disk / "file", os.O_RDONLY)
    try:
        assert share_in_memory([(fd, 0, size)]) == 0
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead
        os.pread(fd, size // 4, 0)
        assert share_in_memory([(fd, 0, size)]) == 0.25
        assert share_in_memory([(fd, 100, size // 4 - 100)]) == 1
        os.pread(fd, size // 4, size // 4)
        assert share_in_memory([(fd, 0, 10), (fd, 0, size), (fd, 5, 0)]) == pytest.approx(0.5, abs=0.01)
        assert share_in_memory([(fd, size - size // 4, size // 8), (fd, size - size // 8, size // 8)]) == 0
        assert share_in_memory([(fd, 2 * size, 100)]) == 0  # behind the end
        assert share_in_memory([(fd, 0, 0)]) is None
    finally:
        os.close(fd)


def test_samples_are_spread_over_all_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fds = [os.open(tmp_path / name, os.O_CREAT | os.O_RDWR) for name in "abc"]
    small = [(fds[number % 3], 1000 * number, 700) for number in range(10_000)]
    samples: list[tuple[int, int]] = []

    def are_cached(fd: int, offsets: list[int]) -> list[bool]:
        samples.extend((fd, offset) for offset in offsets)
        return [False] * len(offsets)

    monkeypatch.setattr(open_files, "are_cached", are_cached)
    assert share_in_memory(small) == 0
    for fd in fds:
        os.close(fd)
    numbers = sorted(offset // 1000 for _, offset in samples)
    assert len(numbers) == pytest.approx(256, abs=1)
    assert all(later - number in (39, 40) for number, later in itertools.pairwise(numbers))
    assert all(fds[offset // 1000 % 3] == fd and offset % 1000 < 700 for fd, offset in samples)


def test_files_of_others_are_not_told(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (disk / "file").write_bytes(b"x" * 100_000)
    fd = os.open(disk / "file", os.O_RDONLY)
    try:
        assert share_in_memory([(fd, 0, 100_000)]) == 1
        monkeypatch.setattr(os, "geteuid", lambda: os.fstat(fd).st_uid + 1)
        assert share_in_memory([(fd, 0, 100_000)]) == 1  # it may be written
        monkeypatch.setattr(os, "access", lambda *_, **__: False)
        assert share_in_memory([(fd, 0, 100_000)]) is None
    finally:
        os.close(fd)


def test_half_of_it_in_memory(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(disk)
    forget(path)
    opens = direct_opens(monkeypatch)
    for share, past in ((0.51, False), (0.49, True)):
        monkeypatch.setattr(open_files, "share_in_memory", lambda _, share=share: share)
        with build_checkpointer("sync") as checkpointer:
            check_loaded(checkpointer.load(path))
        assert bool(opens) is past
        forget(path)


def test_nothing_of_it_on_a_tmpfs(monkeypatch: pytest.MonkeyPatch) -> None:
    if kind_of("/dev/shm") != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    opens = direct_opens(monkeypatch)
    monkeypatch.setattr(open_files, "share_in_memory", lambda _: 0.0)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, build_checkpointer("sync") as checkpointer:
        check_loaded(checkpointer.load(saved(Path(folder))))
    assert not opens
