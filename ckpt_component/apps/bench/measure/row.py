"""Measure one row in this process."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .beside import RawSaves, measure_loads
from .files import files_of, remove, sync_tree
from .loop import Disturbance, Loop
from .memory import device_peak, pss, sampled_peak
from .names import ROWS, Row
from .raw import median
from .saver import Saver
from .states import State, nbytes_of, settle


@dataclass(frozen=True)
class Settings:
    """How a row is measured; see the keys of the same names in `bench.schema`."""

    saves: int
    enough_seconds: float
    loop_threads: int
    step_seconds: float
    tail_seconds: float
    cold: bool
    device: str = "cpu"


def measure_row(name: str, state: State, folder: str, settings: Settings) -> dict[str, Any]:
    """Run a row: the first save, steady ones, some beside the loop, loads, and one under a look at the memory.

    Args:
        name: of the row.
        state: what is saved; its values change.
        folder: where to; it is empty, and is so after.
        settings: how.

    Returns:
        Times in seconds, medians where there are several: `first_stall`, `stall` (what the call takes), `staged`
        (until the tensors may be changed), `complete` (until the row says so), `durable` (synced too), `background`
        (from the return of the call until then), `lost`, `load_warm`, `load_cold` (None where there is no cache to
        drop). Of ours also the hardware's in turn with them: what `beside` gives, from `raw_copy` to `raw_read_cold`.
        Besides: `step_ratio`, `next_steps`, `memory` (bytes; the host's), `device_memory` (None without CUDA), `bytes`,
        `files`, `torn` (tensors that are not as they were when saved), and the row's own facts.
    """
    row = ROWS[name]
    loop = Loop(state, settings.loop_threads, settings.step_seconds)
    saver = make_saver(name, state)
    try:
        # Without the row's own processes, which count as its cost; with the modules that it has imported.
        start_memory = pss(os.getpid())
        first = timed_save(saver, os.path.join(folder, "first"), row.fsyncs)
        remove(os.path.join(folder, "first"))
        steady = _steady(saver, loop, folder, row, settings)
        # Before anything is loaded: what a load frees, malloc may keep.
        path = os.path.join(folder, "memory")
        with sampled_peak() as peak, device_peak(settings.device) as on_device:
            timed_save(saver, path, fsyncs=True)
        remove(path)
        path, disturbed = _beside_the_loop(saver, loop, folder, settings)
        facts = saver.facts(path)
        found: dict[str, Any] = {
            "first_stall": first[0],
            **steady,
            **disturbed,
            "device_memory": on_device.nbytes if settings.device == "cuda" else None,
            "memory": max(0, peak.nbytes - start_memory),
            "bytes": sum(os.path.getsize(name) for name in files_of(path)),
            "files": sum(1 for _ in files_of(path)),
            "state_bytes": nbytes_of(state),
            "tensors": len(state),
            **facts,
            **_loads(saver, path, settings, facts.get("checksum")),
        }
        remove(path)
        return found
    finally:
        saver.close()


def _steady(saver: Saver, loop: Loop, folder: str, row: Row, settings: Settings) -> dict[str, float | None]:
    """Save and remove again, in turn with the hardware alone; the folder is as it was after."""
    times: list[tuple[float, float, float, float]] = []
    raw = RawSaves(nbytes_of(saver.state), folder) if row.family == "ours" else None
    with raw or nullcontext():
        for number in _turns(settings):
            path = os.path.join(folder, f"steady-{number}")
            times.append(_steady_save(saver, loop, path, row.fsyncs))
            if raw is not None:
                raw.turn()
    stall, staged, complete, durable = map(median, zip(*times, strict=True))
    background = median([save[3] - save[0] for save in times])
    found = {"stall": stall, "staged": staged, "complete": complete, "durable": durable, "background": background}
    return found | ({} if raw is None else raw.figures())


def _steady_save(saver: Saver, loop: Loop, path: str, fsyncs: bool) -> tuple[float, float, float, float]:
    """Save and remove again; the figures of `timed_save`.

    When the tensors may be changed and when the save is durable is seen at two saves where the first is after the call:
    waiting for one changes the other.
    """
    loop.update()
    stall, staged, complete, durable = timed_save(saver, path, fsyncs)
    remove(path)
    if type(saver).wait_staged is not Saver.wait_staged:
        loop.update()
        stall, _, complete, durable = timed_save(saver, path, fsyncs, awaited=False)
        remove(path)
    return stall, staged, complete, durable


def _beside_the_loop(saver: Saver, loop: Loop, folder: str, settings: Settings) -> tuple[str, dict[str, float | None]]:
    """Save while the loop goes on; the last save is left, and its path returned."""
    path, found = "", list[Disturbance]()
    for number in _turns(settings):
        if path:
            remove(path)
        path = os.path.join(folder, f"beside-{number}")
        found.append(loop.disturbed_by(saver, path, settings.tail_seconds))
    return path, {
        "lost": median([one.lost_s for one in found]),
        "step_ratio": median([one.step_ratio for one in found]),
        "next_steps": median([one.next_steps for one in found]),
    }


def make_saver(name: str, state: State) -> Saver:
    """The saver of a row; imports what it needs, which may not be there."""
    row = ROWS[name]
    if row.family == "ours":
        from .ours import Ours

        return Ours(state, row.preset, row.overrides)
    if row.family == "torch":
        from . import torch_rows

        if name.startswith("dcp_save"):
            return torch_rows.Dcp(state, threads=int(name[-1]))
        if name.startswith("dcp_async"):
            return torch_rows.DcpAsync(state, name.rpartition("_")[2])
        return torch_rows.TorchSave(state) if name == "torch_save" else torch_rows.Experimental(state)
    if name.startswith("nvrx"):
        from . import nvrx

        kind = nvrx.NvrxTorchSave if "_torch_" in name else nvrx.NvrxDcp
        return kind(state, persistent="persistent" in name, clone=name.endswith("_clone"))
    from . import peers

    if name.startswith("torchsnapshot"):
        return peers.Torchsnapshot(state, in_background=name.endswith("async_take"))
    return peers.Safetensors(state) if name == "safetensors" else peers.TorchCheckpointing(state)


def timed_save(saver: Saver, path: str, fsyncs: bool, *, awaited: bool = True) -> tuple[float, float, float, float]:
    """Save once.

    Args:
        saver: who saves.
        path: a new path.
        fsyncs: whether the saver syncs its files; otherwise they are synced here, on the clock of `durable`.
        awaited: wait until the tensors may be changed; without, `staged` says nothing.

    Returns:
        Seconds from the call: stall, staged, complete, durable.
    """
    settle(saver.state)  # what came before is not the save's
    started = time.perf_counter()
    saver.save(path)
    stall = time.perf_counter() - started
    if awaited:
        saver.wait_staged()
    staged = time.perf_counter() - started
    saver.finish()
    complete = time.perf_counter() - started
    if not fsyncs:
        sync_tree(path)
        return stall, staged, complete, time.perf_counter() - started
    return stall, staged, complete, complete


def _turns(settings: Settings) -> Iterator[int]:
    """Numbers of saves, as many as asked for; at least one, and no further one after `enough_seconds`."""
    began = time.perf_counter()
    for number in range(settings.saves):
        if number and time.perf_counter() - began >= settings.enough_seconds:
            return
        yield number


def _loads(saver: Saver, path: str, settings: Settings, checksum: Any) -> dict[str, Any]:
    # Touched, so that a load does not pay for the pages of its target.
    target = {key: torch.empty_like(value).fill_(math.nan) for key, value in saver.state.items()}

    def load() -> float:
        started = time.perf_counter()
        saver.load(path, target)
        settle(target)
        return time.perf_counter() - started

    found: dict[str, Any] = dict(
        measure_loads(load, path, turns=partial(_turns, settings), cold=settings.cold, raw=checksum)
    )
    # One update came after the save: a snapshot that is whole is behind by 1 everywhere.
    found["torn"] = sum(not torch.equal(target[key] + 1, value) for key, value in saver.state.items())
    return found
