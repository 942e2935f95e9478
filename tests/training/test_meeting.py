from __future__ import annotations

import os
import time

import pytest
from ckpt_train.ranks import ALONE, CONSOLE_LEVEL, CONSOLE_PREFIX, RUN_NAME, join, meet, part
from torch.distributed import TCPStore


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without any launcher's variables; they are as before afterwards."""
    for name in (
        "WORLD_SIZE",
        "RANK",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "SLURM_JOB_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_USE_AGENT_STORE",
        RUN_NAME,
        CONSOLE_LEVEL,
        CONSOLE_PREFIX,
    ):
        monkeypatch.setenv(name, "")  # so that what `meet` sets goes too, also where there was none
        monkeypatch.delenv(name)
    return monkeypatch


def test_one_process_meets_nobody(launched: pytest.MonkeyPatch) -> None:
    assert meet() is ALONE
    launched.setenv("WORLD_SIZE", "1")
    assert meet() is ALONE
    part(ALONE)


def test_a_restart_keeps_the_folder_and_forgets_the_addresses(launched: pytest.MonkeyPatch) -> None:
    server = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    launched.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    launched.setenv("MASTER_ADDR", "127.0.0.1")
    launched.setenv("MASTER_PORT", str(server.port))
    launched.setenv("WORLD_SIZE", "2")
    times = iter("1234")
    launched.setattr(time, "strftime", lambda form: f"time {next(times)}")
    names, stores = [], []
    for start, rank in ((0, 0), (0, 1), (1, 1), (1, 0)):
        launched.setenv("RANK", str(rank))
        launched.setenv("LOCAL_RANK", str(rank))
        launched.setenv("TORCHELASTIC_RESTART_COUNT", str(start))
        me = meet()
        assert (me.rank, me.world_size, me.local_rank) == (rank, 2, rank)
        names.append(os.environ[RUN_NAME])
        stores.append(me.store)
    assert names == ["time 1"] * 4
    stores[0].set("address", "old")
    assert stores[1].get("address") == b"old"  # waits: a `set` is not answered
    assert not stores[2].check(["address"])


def test_hosts_that_count_restarts_differently_meet_in_a_store_that_is_new(launched: pytest.MonkeyPatch) -> None:
    """With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 rank 0 has the store; one host took the place of another."""
    server = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    launched.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    launched.setenv("MASTER_ADDR", "127.0.0.1")
    launched.setenv("MASTER_PORT", str(server.port))
    launched.setenv("WORLD_SIZE", "2")
    server.set("ckpt_train/run", "a name")
    stores = []
    for start in (0, 1):
        launched.setenv("RANK", "1")
        launched.setenv("TORCHELASTIC_RESTART_COUNT", str(start))
        stores.append(meet().store)
    stores[0].set("address", "of a rank")
    assert stores[1].get("address") == b"of a rank"  # waits: a `set` is not answered


def test_one_rank_needs_no_process_group() -> None:
    import torch

    join(ALONE, torch.device("cpu"), 1.0)
    assert not torch.distributed.is_initialized()
