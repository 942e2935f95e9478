"""What the ranks have said to a question, and the count of their votes."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import Any

from ..errors import CheckpointTimeoutError, name_ranks, ranks_failed
from .heartbeat import Watch
from .messages import unpack
from .rank_store import RankStore

#: After the first rank failed, others that fail in the same moment get this long to be named too.
_COMPANY_SECONDS = 0.2


def said(store: RankStore, tag: str, ranks: Iterable[int]) -> list[Any]:
    """What these ranks have said."""
    return [unpack(data) for data in store.read([f"{tag}/said/{rank}" for rank in ranks])]


def missing(store: RankStore, tag: str) -> list[int]:
    """The ranks that have not said anything."""
    return [rank for rank in range(store.world_size) if not store.has(f"{tag}/said/{rank}")]


def count_votes(store: RankStore, tag: str, watch: Watch, deadline: float) -> list[Any]:
    """Wait for all votes, the first failure, or the loss of a rank; on the leading rank.

    Raises:
        RanksError: a rank failed, is lost, or did not vote in time.
    """
    world_size = store.world_size
    lost: dict[int, str] = {}

    def decided() -> bool:
        if store.add(f"{tag}/count", 0) >= world_size or store.add(f"{tag}/failed", 0):
            return True
        lost.update(watch.lost(lambda: missing(store, tag)))
        return bool(lost)

    try:
        store.wait_until(
            decided, deadline, lambda: f"{name_ranks(missing(store, tag)).lower()} to write (timeouts.write)"
        )
    except CheckpointTimeoutError as error:
        late = missing(store, tag)
        raise ranks_failed(
            {rank: "did not finish before timeouts.write was over" for rank in late},
            causes=dict.fromkeys(late, CheckpointTimeoutError.__name__),
        ) from error
    if store.add(f"{tag}/failed", 0):
        time.sleep(_COMPANY_SECONDS)
    silent: Collection[int] = ()
    if store.add(f"{tag}/count", 0) < world_size:
        silent = set(missing(store, tag))
    present = [rank for rank in range(world_size) if rank not in silent]
    votes = said(store, tag, present)
    failures = {rank: vote["error"] for rank, vote in zip(present, votes, strict=True) if "error" in vote}
    if failures or lost:
        errno = next((plain["errno"] for plain in failures.values() if plain["errno"] is not None), None)
        causes = {rank: str(plain["kind"]) for rank, plain in failures.items()} | watch.causes(lost)
        raise ranks_failed({rank: plain["text"] for rank, plain in failures.items()} | lost, errno, causes)
    return [vote["work"] for vote in votes]
