"""Reads of checkpoints in buckets, against obstore's own store in memory; tests/cloud has a server and its faults."""

from __future__ import annotations

import gc
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_component import build_checkpointer
from ckpt_component.core.commit.run_record import stored_metrics
from ckpt_component.core.storage import bucket_store
from ckpt_component.core.storage.bucket import ObjectStorage
from ckpt_component.core.storage.bucket_set import ObjectSet
from ckpt_component.core.storage.file_set import RangeRead
from ckpt_component.core.storage.locate import storage_at
from ckpt_component.errors import CheckpointCorruptError, CheckpointNotFoundError, CheckpointUnreadableError
from ckpt_component.formats import open_index
from ckpt_component.loading import Reader

pytest.importorskip("obstore", reason="pip install 'ckpt_component[cloud]'")

Put = Callable[[Path], str]


@pytest.fixture
def fs(request: pytest.FixtureRequest) -> ObjectStorage:
    storage = storage_at(f"memory://{request.node.name}")
    assert isinstance(storage, ObjectStorage)
    return storage


@pytest.fixture
def put(fs: ObjectStorage) -> Put:
    """Puts a folder, or a file, into the bucket; returns its URL."""

    def put(path: Path, url: str = "") -> str:
        url = url or f"{fs.root}/runs"
        if path.is_dir():
            for each in path.iterdir():
                put(each, f"{url}/{each.name}")
        else:
            fs.write_over(url, path.read_bytes())
        return url

    return put


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    small = {f"layers.{number}": torch.randn(number + 1, generator=generator) for number in range(300)}
    large = torch.randn(1_500_000, generator=generator)  # several pieces
    return {"small": small, "large": large, "half": large[:400_000].bfloat16(), "tied": large, "lr": 0.1}


def tensors(nested: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {**nested["small"], **{key: nested[key] for key in ("large", "half", "tied")}}


def zeros() -> dict[str, Any]:
    loaded = {key: torch.zeros_like(value) for key, value in tensors(state()).items()}
    small = {key: value for key, value in loaded.items() if key.startswith("layers")}
    return {"small": small, "large": loaded["large"], "half": loaded["half"], "tied": loaded["tied"], "lr": 0.0}


def check(loaded: dict[str, Any]) -> None:
    assert loaded["lr"] == 0.1
    found, expected = tensors(loaded), tensors(state())
    assert all(found[key].equal(expected[key]) for key in expected)


@pytest.mark.parametrize("commit", ["rename", "manifest"])
@pytest.mark.parametrize("writer", ["dcp", "torch_save"])
def test_our_own(writer: str, commit: str, tmp_path: Path, put: Put) -> None:
    with build_checkpointer("sync", [f"checkpoint/writer={writer}", f"checkpoint.commit={commit}"]) as checkpointer:
        checkpointer.save(state(), tmp_path / "iter_0000001")
    url = f"{put(tmp_path)}/iter_0000001"
    reader = Reader()
    check(reader.read(url)[0])
    check(reader.read(url, zeros())[0])
    assert reader.verify(url) and reader.last_read["verified"]
    index = open_index(storage_at(url), url)
    assert (index.path, index.step, index.verified) == (url, 1, True)
    assert {"large", "lr", "small.layers.7"} <= index.entries.keys()
    assert stored_metrics(url) == {}


def test_those_of_other_programs(tmp_path: Path, put: Put) -> None:
    pytest.importorskip("safetensors")
    from safetensors.torch import save_file

    flat = tensors(state())
    del flat["tied"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no process group
        dcp.save(dict(flat), checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.save(flat, tmp_path / "weights.pt")
    save_file(flat, tmp_path / "weights.safetensors")
    (tmp_path / "hub").mkdir()
    save_file(flat, tmp_path / "hub" / "model.safetensors")
    root = put(tmp_path)
    for name, form in (
        ("dcp", "dcp (torch)"),
        ("weights.pt", "torch_save (file)"),
        ("weights.safetensors", "safetensors (file)"),
        ("hub", "safetensors (file)"),
    ):
        target = {key: torch.zeros_like(value) for key, value in flat.items()}
        Reader().read(f"{root}/{name}", target)
        assert all(target[key].equal(value) for key, value in flat.items()), name
        index = open_index(storage_at(root), f"{root}/{name}")
        assert index.format == form and index.entries.keys() == flat.keys()


def test_what_is_not_there_or_damaged(fs: ObjectStorage, tmp_path: Path, put: Put) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint at memory://"):
        Reader().read(f"{fs.root}/nothing")
    with build_checkpointer("sync", ["checkpoint.commit=manifest"]) as checkpointer:
        checkpointer.save(state(), tmp_path / "one")
    url = f"{put(tmp_path)}/one"
    index = open_index(storage_at(url), url)
    (piece,) = index.contents.ranges_at(index.entries["large"].place)
    path = f"{index.folder}/{piece.file}"
    data = bytearray(fs.read(path, 1 << 30))
    data[piece.offset + piece.length // 2] ^= 1
    fs.write_over(path, bytes(data))
    with pytest.raises(CheckpointCorruptError, match="large.*is damaged"):
        Reader().read(url, zeros())
    fs.write_over(path, bytes(data[:-1]))
    with pytest.raises(CheckpointCorruptError, match="bytes; manifest.json lists it"):
        Reader().read(url)
    fs.unlink(path)
    with pytest.raises(CheckpointCorruptError, match="is missing"):
        Reader().read(url)


class Held:
    """How many answers of a store are in memory."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    def counted(self, answer: memoryview) -> memoryview:
        array = np.frombuffer(answer, dtype=np.uint8)
        weakref.finalize(array, self._drop)
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        return memoryview(array)  # type: ignore[arg-type]

    def _drop(self) -> None:
        with self._lock:
            self.now -= 1


class Bytes:
    """An object of random bytes, and what was fetched of it."""

    def __init__(self, fs: ObjectStorage, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data = os.urandom(size)
        fs.write_over(f"{fs.root}/x/file", self.data)
        self.fetched: list[tuple[int, int]] = []
        genuine = fs.read_range

        def read_range(path: str, offset: int, length: int) -> memoryview:
            self.fetched.append((offset, length))
            return self.held.counted(genuine(path, offset, length))

        monkeypatch.setattr(fs, "read_range", read_range)
        self.held = Held()
        self.wrong: list[int] = []

    def read(self, files: ObjectSet, ranges: list[tuple[int, int]]) -> None:
        def one(offset: int, length: int) -> None:
            buffer = memoryview(bytearray(length))
            if not files.fill("file", buffer, offset) or buffer != self.data[offset : offset + length]:
                self.wrong.append(offset)

        files.read_all([RangeRead("file", *each, partial(one, *each)) for each in ranges])


#: What is fetched in one request, at most, and what may be fetched between two ranges.
PIECE, GAP = 4 << 20, 256 << 10


def test_each_byte_is_fetched_once_and_nothing_else(fs: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Bytes(fs, 8 * PIECE, monkeypatch)
    one, far = (3, 5 * PIECE), (7 * PIECE, 10)
    many = [(5 * PIECE + 50_000 + 100 * number, 90) for number in range(1500)]
    with fs.open_files(f"{fs.root}/x") as files:
        stored.read(files, [far, *many[::-1], one])
    assert not stored.wrong
    times = np.zeros(len(stored.data), dtype=np.uint8)
    for offset, length in stored.fetched:
        times[offset : offset + length] += 1
    wanted = np.zeros(len(stored.data), dtype=bool)
    for offset, length in (one, far, (many[0][0], many[-1][0] + 90 - many[0][0])):
        wanted[offset : offset + length] = True
    assert times.max() == 1 and times[[offset for offset, _ in [one, far, *many]]].all()
    assert (
        np.count_nonzero(times[~wanted]) <= GAP and np.count_nonzero(times[wanted] == 0) <= 20 * 10
    )  # between batches
    assert all(length <= PIECE for _, length in stored.fetched) and len(stored.fetched) < 20


def test_memory_is_bounded_and_ranges_may_overlap(fs: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large range few pieces are held at a time, and none at the end."""
    stored = Bytes(fs, 26 * PIECE, monkeypatch)
    with fs.open_files(f"{fs.root}/x") as files:
        stored.read(files, [(0, 24 * PIECE), (PIECE // 2, PIECE), (5, 7)])
        gc.collect()
        assert stored.held.now == 0
    assert not stored.wrong and 1 < stored.held.most <= 2 * (1 + 8)  # two threads, which read 8 pieces ahead


def test_one_small_read_after_the_other_is_few_requests(fs: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Bytes(fs, 1 << 20, monkeypatch)
    with fs.open_files(f"{fs.root}/x") as files:
        for offset in range(0, 1 << 20, 1 << 10):
            buffer = memoryview(bytearray(1 << 10))
            assert files.fill("file", buffer, offset) and buffer == stored.data[offset : offset + (1 << 10)]
        assert not files.fill("file", memoryview(bytearray(2)), (1 << 20) - 1)
        with files.stream("file") as stream:
            assert stream.seek(-5, os.SEEK_END) == (1 << 20) - 5 and stream.read() == stored.data[-5:]
    assert len(stored.fetched) <= 6


def test_a_failing_request_is_repeated_for_a_while(fs: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Bytes(fs, 5000, monkeypatch)
    genuine, failures = fs.read_range, [OSError(5, "reset by the test")] * 3

    def read_range(path: str, offset: int, length: int) -> memoryview:
        if failures:
            raise failures.pop()
        return genuine(path, offset, length)[: length - short]

    short = 0
    monkeypatch.setattr(fs, "read_range", read_range)
    with fs.open_files(f"{fs.root}/x") as files:
        stored.read(files, [(0, 5000)])
        assert not stored.wrong and not failures
    short = 1
    monkeypatch.setattr(bucket_store, "_PATIENCE", 0.01)
    with (
        fs.open_files(f"{fs.root}/x") as files,
        pytest.raises(CheckpointUnreadableError, match="4999 bytes came of 5000"),
    ):
        stored.read(files, [(0, 5000)])
