"""What the commands do with the folder of one of several hosts, which has a part of each checkpoint."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from host_cluster import Cluster
from rank_threads import rank_threads

from ckpt_component import PerRank, build_checkpointer
from ckpt_component.core.coordination import StoreCoordinator


@pytest.fixture
def part(tmp_path: Path) -> Iterator[Path]:
    """The folder of the second of two hosts."""
    building = threading.Lock()
    with contextlib.closing(Cluster(tmp_path, hosts=("a", "b"))) as cluster, rank_threads(2) as on_all:

        def save(ranks: StoreCoordinator) -> None:
            storage = cluster.storages[ranks.rank]
            with building:  # Hydra composes one config at a time
                made = build_checkpointer("sync", ranks=ranks, storage_of=lambda _: storage)
            with made as checkpointer:
                state = {"weight": torch.arange(64.0), "own": PerRank(torch.full((8,), float(ranks.rank)))}
                path = f"{cluster.root}/iter_0000003"
                checkpointer.save(state, path)
                loaded = checkpointer.load(path, {"weight": torch.zeros(64), "own": PerRank(torch.zeros(8))})
                assert torch.equal(loaded["weight"], torch.arange(64.0))
                assert loaded["own"].value.tolist() == [ranks.rank] * 8

        assert on_all(save) == [None, None]
        yield cluster.folders["b"]


def test_a_part_is_listed_and_left_alone(ckpt: Callable[..., Any], part: Path) -> None:
    before = sorted(part.rglob("*"))
    listed = ckpt("ls", part)
    assert "part: its files are on a, b" in listed.out and "0 checkpoints" in listed.out and "1 part" in listed.out
    (entry,) = ckpt("ls", part, "--json").json["entries"]
    assert (entry["state"], entry["step"], entry["ranks"]) == ("part", 3, 2)
    assert "nothing to delete" in ckpt("gc", part, "--keep-last", "1", "--ended").out
    shown = ckpt("show", part / "iter_0000003")
    assert shown.code == 2 and "a part of a checkpoint" in shown.err
    assert {*before} <= {*part.rglob("*")}


def test_what_is_here_of_a_part_is_verified(ckpt: Callable[..., Any], part: Path) -> None:
    verified = ckpt("verify", part)
    assert (
        verified.code == 2
        and "a part: what is here is whole" in verified.out
        and "other files are on a" in verified.out
    )
    (file,) = part.glob("*/*/__1_*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    damaged = ckpt("verify", f"{part}@3")
    assert damaged.code == 1 and file.name in damaged.out


def test_a_part_is_deleted_by_force_alone(ckpt: Callable[..., Any], part: Path) -> None:
    refused = ckpt("rm", f"{part}@3")
    assert refused.code == 2 and "is not deleted" in refused.err and "--force" in refused.err
    assert (part / "iter_0000003").exists()
    assert ckpt("rm", f"{part}@3", "--force", "--ended").code == 0
    assert not (part / "iter_0000003").exists()
