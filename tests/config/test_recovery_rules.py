"""Group `checkpoint/recovery`: what does not fit is refused with what to type instead, and all that fits is built."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckpt_component import CheckpointConfigError, build_manager

HOST = "checkpoint/recovery=host"


@pytest.mark.parametrize(
    ("preset", "overrides", "text"),
    [
        (
            "sync",
            [HOST],
            "checkpoint/recovery=host keeps the newest snapshot in a writer process that outlives training, and "
            "checkpoint/caller=inline has none. Use checkpoint=async_persistent, or checkpoint/recovery=none.",
        ),
        (
            "async_temporal",
            [HOST],
            "checkpoint/recovery=host keeps the newest snapshot in a writer process that outlives training, and "
            "checkpoint/caller=temporal has none. Use checkpoint=async_persistent, or checkpoint/recovery=none.",
        ),
        (
            "async_persistent",
            ["checkpoint.recovery.every_steps=5"],
            "checkpoint.recovery.every_steps=5 is how often a snapshot goes to memory, and checkpoint/recovery=none keeps "
            "none there. Use checkpoint/recovery=host, or checkpoint.recovery.every_steps=null.",
        ),
        (
            "sync",
            ["checkpoint.recovery.lease=2m"],
            "checkpoint.recovery.lease=120 is how long a snapshot stays in memory, and checkpoint/recovery=none keeps none "
            "there. Use checkpoint/recovery=host, or leave it out.",
        ),
        (
            "sync",
            ["checkpoint/recovery=peers"],
            "checkpoint/recovery=peers keeps the newest snapshot in a writer process that outlives training, and "
            "checkpoint/caller=inline has none. Use checkpoint=async_persistent, or checkpoint/recovery=none.",
        ),
        *(
            (
                "async_persistent",
                [HOST, f"checkpoint.recovery.{key}"],
                "checkpoint.recovery.replicas, peers and max_bytes_per_second say how copies of snapshots get to other "
                "hosts, and checkpoint/recovery=host sends none. Use checkpoint/recovery=peers, or leave them out.",
            )
            for key in ("replicas=2", "peers={a: b}", "max_bytes_per_second=1GB")
        ),
        (
            "async_persistent",
            ["checkpoint/recovery=peers", "checkpoint.recovery.peers={a: b, c: c}"],
            "checkpoint.recovery.peers has c keep its own copies; give it another host, or leave it out.",
        ),
        (
            "async_persistent",
            ["checkpoint/recovery=peers", "checkpoint.recovery.peers=node4"],
            "checkpoint.recovery.peers='node4' is not a dict of hosts; give each the one that has its copies: "
            "'checkpoint.recovery.peers={node1:node4}'",
        ),
    ],
)
def test_what_does_not_fit_is_refused(preset: str, overrides: list[str], text: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointConfigError, match=f"^{re.escape(text)}$"):
        build_manager(preset, overrides, dir=tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("every", [1, 7, 100, 1000], ids=str)
def test_snapshots_for_memory_may_be_as_rare_as_one_likes(every: int, tmp_path: Path) -> None:
    build_manager("async_persistent", [HOST, f"checkpoint.recovery.every_steps={every}"], dir=tmp_path).close()


@pytest.mark.parametrize("preset", ["off", "async_persistent"])
def test_where_nothing_is_saved_nothing_is_refused(preset: str, tmp_path: Path) -> None:
    overrides = ["checkpoint.enabled=false", HOST, "checkpoint.recovery.every_steps=5"]
    with build_manager(preset, overrides, dir=tmp_path) as manager:
        assert manager.restore({}) is None
