"""Measure one row in this process."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ckpt_component.core.storage.checksum import PROVIDERS

from .beside import RawSaves, measure_loads
from .limits import measure_limits
from .memory import device_peak, pss, sampled_peak
from .raw import median
from .row_kinds import LIMITS, ROWS, RowKind
from .saver import Saver
from .states import State, make_state, nbytes_of, settle
from .target_files import files_of, remove, sync_tree
from .training_loop import Loop, in_turn


@dataclass(frozen=True)
class RowSettings:
    """How a row is measured; see the keys of the same names in `schema`."""

    saves: int
    enough_seconds: float
    loop_threads: int
    step_seconds: float
    tail_seconds: float
    pairs: int
    cold: bool
    device: str = "cpu"


def measure(row: str, state: str, folder: str, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure a row, or the hardware's limits, in a process of its own.

    Args:
        row: name of the row, or `LIMITS`
        state: name of the state
        folder: where to save; empty before and after
        settings: arguments of `RowSettings`

    Returns:
        The figures, part by part.
    """
    how = RowSettings(**settings)
    made = make_state(state, device=how.device)
    if row == LIMITS:
        return measure_limits(made, folder, _turns(how), how.cold)
    if ROWS[row].family == "ours" and not ROWS[row].fast:
        # Packages that compute checksums faster than zlib are hidden from their import.
        hidden: dict[str, Any] = {provider.module: None for provider in PROVIDERS if provider.package != "zlib"}
        sys.modules.update(hidden)
    return measure_row(row, made, folder, how)


def measure_row(name: str, state: State, folder: str, settings: RowSettings) -> Iterator[dict[str, Any]]:
    """Run a row: the first save, further saves, saves during the loop, one that samples memory, and loads.

    Args:
        name: name of the row
        state: what is saved; its values change
        folder: where to save; empty before and after
        settings: how to measure

    Yields:
        Part by part, so that a row that is killed leaves what it has: times in seconds, medians of repeated ones,
        `first_stall`, `stall` (duration of the call), `staged` (until the tensors may be changed), `complete` (until
        the row reports completion), `durable` (also synced), `background` (from the return of the call to `durable`),
        `lost`, `lost_cpu`, `lost_queue` (see `Disturbance`), `load_warm`, `load_cold` (None without a cache to drop).
        For our rows also the hardware's figures of `beside`, from `raw_copy` to `raw_read_cold`. In addition
        `step_ratio`, `next_steps`, `memory` (host bytes), `device_memory` (None without CUDA), `bytes`, `files`, `torn`
        (tensors that differ from their values at the save), and facts of the row.
    """
    row = ROWS[name]
    loop = Loop(state, settings.loop_threads, settings.step_seconds)
    saver = make_saver(name, state)
    try:
        # Includes the imported modules, but not the row's processes, which count as its cost.
        start_memory = pss(os.getpid())
        first = timed_save(saver, os.path.join(folder, "first"), row.fsyncs)
        remove(os.path.join(folder, "first"))
        yield {"first_stall": first[0], "state_bytes": nbytes_of(state), "tensors": len(state)}
        yield _steady(saver, loop, folder, row, settings)
        # Before any load, because malloc may keep the memory that a load frees.
        path = os.path.join(folder, "memory")
        with sampled_peak() as peak, device_peak(settings.device) as on_device:
            timed_save(saver, path, fsyncs=True)
        remove(path)
        yield {
            "device_memory": on_device.nbytes if settings.device == "cuda" else None,
            "memory": max(0, peak.nbytes - start_memory),
        }
        path, disturbed = _beside_the_loop(saver, loop, folder, settings)
        facts = saver.facts(path)
        sizes = list(map(os.path.getsize, files_of(path)))
        yield {**disturbed, "bytes": sum(sizes), "files": len(sizes), **facts}
        yield _loads(saver, path, settings, facts.get("checksum"))
        remove(path)
    finally:
        saver.close()


def _steady(saver: Saver, loop: Loop, folder: str, row: RowKind, settings: RowSettings) -> dict[str, float | None]:
    """Save and remove repeatedly, in turn with raw copies and writes; the folder is empty afterwards."""
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
    figures = {"stall": stall, "staged": staged, "complete": complete, "durable": durable, "background": background}
    return figures | ({} if raw is None else raw.figures())


def _steady_save(saver: Saver, loop: Loop, path: str, fsyncs: bool) -> tuple[float, float, float, float]:
    """Save and remove; return the figures of `timed_save`.

    If a row stages after the call, `staged` and `durable` come from two saves, because waiting for the first delays the
    second.
    """
    loop.update()
    stall, staged, complete, durable = timed_save(saver, path, fsyncs)
    remove(path)
    if type(saver).wait_staged is not Saver.wait_staged:
        loop.update()
        stall, _, complete, durable = timed_save(saver, path, fsyncs, awaited=False)
        remove(path)
    return stall, staged, complete, durable


def _beside_the_loop(
    saver: Saver, loop: Loop, folder: str, settings: RowSettings
) -> tuple[str, dict[str, float | None]]:
    """Save while the loop runs. Keep the last save and return its path."""
    path, found = in_turn(loop, saver, folder, _turns(settings, settings.pairs), settings.tail_seconds, remove)
    return path, {
        "lost": median([each.lost_s for each in found]),
        "lost_cpu": median([each.lost_cpu_s for each in found]),
        "lost_queue": median([each.lost_queue_s for each in found]),
        "step_ratio": median([each.step_ratio for each in found]),
        "next_steps": median([each.next_steps for each in found]),
    }


def make_saver(name: str, state: State) -> Saver:
    """Make the saver of a row. Imports the packages that it needs, which may be missing."""
    row = ROWS[name]
    if row.family == "ours":
        from .our_rows import Ours

        return Ours(state, row.preset, row.overrides)
    if row.family == "torch":
        from . import torch_rows

        if name.startswith("dcp_save"):
            return torch_rows.Dcp(state, threads=int(name[-1]))
        if name.startswith("dcp_async"):
            return torch_rows.DcpAsync(state, name.rpartition("_")[2])
        return torch_rows.TorchSave(state) if name == "torch_save" else torch_rows.Experimental(state)
    if name.startswith("nvrx"):
        from . import nvrx_rows

        kind = nvrx_rows.NvrxTorchSave if "_torch_" in name else nvrx_rows.NvrxDcp
        return kind(state, persistent="persistent" in name, clone=name.endswith("_clone"))
    from . import peer_rows

    if name.startswith("torchsnapshot"):
        return peer_rows.Torchsnapshot(state, in_background=name.endswith("async_take"))
    return peer_rows.Safetensors(state) if name == "safetensors" else peer_rows.TorchCheckpointing(state)


def timed_save(saver: Saver, path: str, fsyncs: bool, *, awaited: bool = True) -> tuple[float, float, float, float]:
    """Save once.

    Args:
        saver: the saver
        path: a new path
        fsyncs: whether the saver syncs its files; if not, they are synced here, as part of `durable`
        awaited: wait until the tensors may be changed; otherwise `staged` is meaningless

    Returns:
        Seconds from the call: stall, staged, complete, durable.
    """
    settle(saver.state)  # earlier work must not count
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


def _turns(settings: RowSettings, count: int | None = None) -> Iterator[int]:
    """Numbers of up to `count` saves, by default `saves`; after `enough_seconds`, no further one."""
    began = time.perf_counter()
    for number in range(settings.saves if count is None else count):
        if number and time.perf_counter() - began >= settings.enough_seconds:
            return
        yield number


def _loads(saver: Saver, path: str, settings: RowSettings, checksum: Any) -> dict[str, Any]:
    # Touched, so that a load does not include page faults of its target.
    target = {key: torch.empty_like(value).fill_(math.nan) for key, value in saver.state.items()}

    def load() -> float:
        started = time.perf_counter()
        saver.load(path, target)
        settle(target)
        return time.perf_counter() - started

    figures: dict[str, Any] = dict(
        measure_loads(load, path, turns=partial(_turns, settings), cold=settings.cold, raw=checksum)
    )
    # One update followed the save, so every element of a consistent snapshot is smaller by 1.
    figures["torn"] = sum(not torch.equal(target[key] + 1, value) for key, value in saver.state.items())
    return figures
