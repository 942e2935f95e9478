"""Ranks as threads of this process, each with its own connection to a store, for tests of what ranks agree on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore

from ckpt_component.core.coordination import RankStore, StoreCoordinator
from ckpt_component.core.coordination.connection import StoreConnection, another_connection
from ckpt_component.core.outside import OUTSIDE, Outside


def on_all(ranks: Sequence[StoreCoordinator], call: Callable[[StoreCoordinator], Any]) -> list[Any]:
    """Call a function on all ranks, each in a thread; returns what it returns or raises there, by rank."""

    def run(coordinator: StoreCoordinator) -> Any:
        try:
            return call(coordinator)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        calls = [pool.submit(run, rank) for rank in ranks]
        ended, _ = wait(calls, timeout=60)
        assert len(ended) == len(calls), f"after 60 s only these had ended: {[each.result() for each in ended]}"
        return [each.result() for each in calls]


@contextlib.contextmanager
def rank_threads(
    world_size: int, outsides: Sequence[Outside] | None = None
) -> Iterator[Callable[[Callable[[StoreCoordinator], Any]], list[Any]]]:
    """Gives `on_all` for so many ranks.

    Args:
        world_size: how many there are
        outsides: what each of them runs in; None: the real one
    """
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    ranks = list[StoreCoordinator]()
    for rank, outside in enumerate(outsides or [OUTSIDE] * world_size):
        connection = StoreConnection(another_connection(dist, store), 60.0, opens=False, outside=outside)
        ranks.append(StoreCoordinator(RankStore(connection, rank, world_size, "test/")))
    try:
        yield partial(on_all, ranks)
    finally:
        for coordinator in ranks:
            coordinator.close()
