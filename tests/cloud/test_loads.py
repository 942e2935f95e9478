"""Loads from a bucket of a real S3 server: what they fetch, what they survive, and where a run resumes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from cloud.proxy import Answer, CutAfter, CutBefore, CutBody, FaultProxy, Request
from cloud.server import Bucket
from ranks import run_ranks

from ckpt_component import build_checkpointer, build_manager
from ckpt_component.core.storage import bucket_store
from ckpt_component.core.storage.locate import storage_at
from ckpt_component.errors import CheckpointUnreadableError
from ckpt_component.formats import open_index

pytestmark = pytest.mark.slow


def is_read(request: Request) -> bool:
    return request.method == "GET" and ".distcp" in request.key


def filled(value: float) -> dict[str, torch.Tensor]:
    return {f"layer.{number}": torch.full((250_000,), value + number) for number in range(20)}


def saved(url: str) -> str:
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save(filled(1.0), url)
    return url


def test_one_tensor_of_many_is_one_ranged_read(bucket: Bucket, proxy: FaultProxy) -> None:
    url = saved(f"{bucket.url}/one")
    proxy.clear()
    target = {"layer.7": torch.zeros(250_000)}
    with build_checkpointer("sync") as checkpointer:
        checkpointer.load(url, target)
    assert target["layer.7"].equal(filled(1.0)["layer.7"])
    (read,) = filter(is_read, proxy.log)
    first, last = map(int, read.headers["range"].removeprefix("bytes=").split("-"))
    assert 1_000_000 <= last + 1 - first < 1_010_000


def test_two_hosts_fetch_each_byte_once(bucket: Bucket, proxy: FaultProxy, tmp_path: Path) -> None:
    saved(f"{bucket.url}/one")
    proxy.clear()
    script = Path(__file__).parent / "two_ranks.py"
    assert (
        run_ranks(script, "load_on_two_hosts", 2, tmp_path, BUCKET=bucket.url) == [f"{20 + sum(range(20)):.1f}\n"] * 2
    )
    fetched = [map(int, read.headers["range"].removeprefix("bytes=").split("-")) for read in filter(is_read, proxy.log)]
    assert 20_000_000 <= sum(last + 1 - first for first, last in fetched) < 20_400_000


@pytest.mark.parametrize(
    "fault",
    [
        CutBody(),
        *(pytest.param(each, marks=pytest.mark.soak) for each in (CutBefore(), CutAfter(), Answer(500), Answer(503))),
    ],
    ids=["body", "before", "after", "500", "503"],
)
def test_every_request_of_a_load_may_fail(fault: Any, bucket: Bucket, proxy: FaultProxy) -> None:
    url = saved(f"{bucket.url}/one")
    proxy.clear()
    with build_checkpointer("sync") as checkpointer:
        checkpointer.load(url, filled(0.0))
        count, expected = len(proxy.log), filled(1.0)
        for number in range(1, count + 1):
            proxy.clear()
            rule = proxy.add(fault, nth=number)
            target = filled(0.0)
            checkpointer.load(url, target)
            assert rule.hits and all(target[key].equal(value) for key, value in expected.items())


def test_a_store_that_stays_away_is_no_damage(
    bucket: Bucket, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = saved(f"{bucket.url}/one")
    monkeypatch.setattr(bucket_store, "_PATIENCE", 0.5)
    proxy.add(Answer(503), times=None, where=is_read)
    with (
        build_checkpointer("sync", ["+checkpoint.storage.options.max_retries=1"]) as checkpointer,
        pytest.raises(CheckpointUnreadableError, match="SlowDown"),
    ):
        checkpointer.load(url, filled(0.0))


def test_resume_falls_back_past_a_damaged_checkpoint_and_keeps_it(
    bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    root = f"{bucket.url}/run"
    with build_manager("sync", dir=root) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": torch.full((1000,), float(step))}, metrics={"loss": abs(step - 2.0)})
    with build_manager(
        "sync",
        [
            "checkpoint.resume=best",
            "checkpoint.keep.best.metric=loss",
            "checkpoint.rewind=false",
            "checkpoint.save.every_steps=null",
            "checkpoint.save.at_end=false",
        ],
        dir=root,
    ) as manager:
        target = {"w": torch.zeros(1000)}
        assert manager.restore(target) == 2 and target["w"][0] == 2
    index = open_index(storage_at(root), f"{root}/iter_0000003")
    (piece,) = index.contents.ranges_at(index.entries["w"].place)
    path = f"{index.folder}/{piece.file}"
    data = bytearray(index.storage.read(path, 1 << 20))
    data[piece.offset + piece.length // 2] ^= 1
    index.storage.write_over(path, bytes(data))
    with caplog.at_level(logging.ERROR), build_manager("sync", dir=root) as manager:
        target = {"w": torch.zeros(1000)}
        assert manager.restore(target) == 2 and target["w"][0] == 2
    assert "is damaged; it is kept as" in caplog.text
    with build_manager("sync", dir=root) as manager:
        assert manager.restore({"w": torch.zeros(1000)}) == 2
        manager.save(3, {"w": torch.full((1000,), 33.0)})
    with build_manager("sync", dir=root) as manager:
        target = {"w": torch.zeros(1000)}
        assert manager.restore(target) == 3 and target["w"][0] == 33


@pytest.mark.filterwarnings("ignore")
def test_stock_dcp_reads_it_through_fsspec(bucket: Bucket, tmp_path: Path) -> None:
    pytest.importorskip("s3fs", reason="pip install s3fs")
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import _fsspec_filesystem as fsspec_dcp

    url = saved(f"{bucket.url}/iter_0000001")
    folder = open_index(storage_at(url), url).folder
    target = filled(0.0)
    storage = {"endpoint_url": bucket.server.endpoint, "key": "test", "secret": "not-a-secret"}
    dcp.load(target, storage_reader=fsspec_dcp.FsspecReader(folder, **storage), no_dist=True)
    assert all(target[key].equal(value) for key, value in filled(1.0).items())
