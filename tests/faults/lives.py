"""One life of a training job in the soak: come back, check, save until killed. On one rank, and on two."""

from __future__ import annotations

import datetime
import os
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from faults.invariants import blank_state, differences, state_of
from faults.workloads import acknowledge, newest_ack, prepare
from inside import checkpointer_of

from ckpt_component import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointLoadError,
    CheckpointManager,
    WorkerDiedError,
    build_manager,
)
from ckpt_component.core.storage.files import FAILPOINT, FAILPOINT_LOG

__all__ = ["prepare"]  # of the fork server, before the fork

KEEP = 2
SOAK = (
    f"checkpoint.keep.last={KEEP}",
    "checkpoint.save.at_end=false",
    "checkpoint.timeouts.stage=5",
    "checkpoint.timeouts.write=10",
    "checkpoint.timeouts.close=5",
    "checkpoint.timeouts.heartbeat=1",
    "checkpoint.timeouts.stall=9",
    # A rank that dies before its first sign of life is waited for as long as one that is late.
    "checkpoint.timeouts.visible=5",
)
_MEET_SECONDS = 10.0


def live(root: str, acks: str, saves: int, log: str, failpoint: str = "", preset: str = "sync") -> dict[str, Any]:
    """Come back, check what is there, and save some steps; each is acknowledged when the manager has said so.

    A save that fails, because the writer process was killed, is an event like any other: the next step is saved.

    Returns:
        Unless it is killed: the violations that it found, and how many saves failed.
    """
    os.environ |= {FAILPOINT_LOG: log} | ({FAILPOINT: failpoint} if failpoint else {})
    acknowledged = newest_ack(acks)
    Path(f"{log}.ready0").touch()
    try:
        manager = build_manager(preset, SOAK, dir=root)
    except WorkerDiedError as error:  # it was killed in its first moment
        return {"violations": [], "failed": str(error)}
    with manager:
        wrong, step = check_all(manager, acknowledged)
        failed = 0
        for number in range(step + 1, step + 1 + saves) if not wrong else ():
            try:
                manager.save(number, state_of(number))
                manager.wait()
            except CheckpointError:
                failed += 1
                continue
            acknowledge(acks, number)
    return {"violations": wrong, "failed": failed}


def live_on_ranks(
    rank: int,
    world_size: int,
    root: str,
    acks: str,
    saves: int,
    log: str,
    failpoint: str = "",
    preset: str = "sync",
    overrides: Sequence[str] = (),
    all_live: bool = False,
) -> dict[str, Any]:
    """The same on several ranks: when one is killed, the others hear of it in bounded time, and leave.

    With `all_live` nobody is going to be killed, so that after a failed save too rank 0, in which the store lives,
    waits for the others.
    """
    os.environ["RANK"] = str(rank)
    os.environ |= {FAILPOINT_LOG: log} | ({FAILPOINT: failpoint} if failpoint else {})
    wrong: list[str] = []
    failed = None
    try:
        store = meet(rank, world_size, Path(f"{log}.meeting"))
        Path(f"{log}.ready{rank}").touch()
        manager = build_manager(preset, (*SOAK, *overrides), dir=root)
        wrong, step = check_all(manager, newest_ack(acks))
        for number in range(step + 1, step + 1 + saves) if not wrong else ():
            manager.save(number, state_of(number))
            manager.wait()
            if rank == 0:
                acknowledge(acks, number)
        manager.close()
        end_together(store, rank, world_size)
    except (CheckpointCorruptError, CheckpointLoadError) as error:
        wrong = [f"I2: {type(error).__name__}: {error}"]
    except (CheckpointError, RuntimeError, TimeoutError) as error:  # all errors of torch's stores are RuntimeErrors
        failed = f"{type(error).__name__}: {error}"
        traceback.print_exc()
        if all_live:
            end_together(store, rank, world_size)
    return {"violations": wrong, "failed": failed}


def end_together(store: Any, rank: int, world_size: int) -> None:
    """The store lives in rank 0, which must not end before the others have read from it."""
    store.add("ended", 1)
    deadline = time.monotonic() + _MEET_SECONDS
    while rank == 0 and store.add("ended", 0) < world_size and time.monotonic() < deadline:
        time.sleep(0.001)


def meet(rank: int, world_size: int, meeting: Path) -> Any:
    """Initialize `torch.distributed` over a store on a free port; returns the store."""
    import torch.distributed as dist

    patience = datetime.timedelta(seconds=_MEET_SECONDS)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False, timeout=patience)
        draft = meeting.with_suffix(".draft")
        draft.write_text(str(store.port))
        draft.rename(meeting)
    else:
        deadline = time.monotonic() + _MEET_SECONDS
        while not meeting.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("rank 0 did not come up")
            time.sleep(0.001)
        port = int(meeting.read_text())
        store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False, timeout=patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=patience)
    return store


def check_all(manager: CheckpointManager, acknowledged: int) -> tuple[list[str], int]:
    """Restore, and compare all that is listed with what was saved; returns what is wrong, and the newest step."""
    target = blank_state()
    resumed = manager.restore(target) or 0
    wrong = [f"I2: step {resumed}: {text}" for text in differences(target, state_of(resumed))]
    if resumed < acknowledged:
        wrong.append(f"I1: step {acknowledged} was acknowledged, and step {resumed} is the newest: {manager.steps()}")
    for step in manager.steps() if os.environ.get("RANK", "0") == "0" else ():
        loaded = checkpointer_of(manager).load(manager.path_of(step), alone=True)
        wrong += [f"I1: step {step}: {text}" for text in differences(loaded, state_of(step))]
    return wrong, resumed
