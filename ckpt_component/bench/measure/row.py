"""One row, measured in this process."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from typing import Any

import torch

from .files import drop_cache, files_of, fill_cache, remove, sync_tree
from .loop import Loop
from .memory import device_peak, pss, sampled_peak
from .names import ROWS
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
    """Run a row: the first save, steady ones, one beside the loop, loads, and one under a look at the memory.

    Args:
        name: of the row.
        state: what is saved; its values change.
        folder: where to; it is empty, and is so after.
        settings: how.

    Returns:
        Times in seconds, medians where there are several: `first_stall`, `stall` (what the call takes), `staged`
        (until the tensors may be changed), `complete` (until the row says so), `durable` (synced too), `lost`,
        `load_warm`, `load_cold` (None where there is no cache to drop). Besides: `step_ratio`, `next_steps`, `memory`
        (bytes; the host's), `device_memory` (None without CUDA),
        `bytes`, `files`, `torn` (tensors that are not as they were when saved), and the row's own facts.
    """
    row = ROWS[name]
    loop = Loop(state, settings.loop_threads, settings.step_seconds)
    saver = make_saver(name, state)
    try:
        # Without the row's own processes, which count as its cost; with the modules that it has imported.
        start_memory = pss(os.getpid())
        first = timed_save(saver, os.path.join(folder, "first"), row.fsyncs)
        remove(os.path.join(folder, "first"))
        steady: list[tuple[float, float, float, float]] = []
        began = time.perf_counter()
        while len(steady) < settings.saves and (not steady or time.perf_counter() - began < settings.enough_seconds):
            path = os.path.join(folder, f"steady-{len(steady)}")
            loop.update()
            steady.append(timed_save(saver, path, row.fsyncs))
            remove(path)
        # Before anything is loaded: what a load frees, malloc may keep.
        path = os.path.join(folder, "memory")
        with sampled_peak() as peak, device_peak(settings.device) as on_device:
            timed_save(saver, path, fsyncs=True)
        remove(path)
        path = os.path.join(folder, "beside")
        disturbance = loop.disturbed_by(saver, path, settings.tail_seconds)
        found: dict[str, Any] = {
            "first_stall": first[0],
            **dict(zip(("stall", "staged", "complete", "durable"), _medians(steady), strict=True)),
            "lost": disturbance.lost_s,
            "step_ratio": disturbance.step_ratio,
            "next_steps": disturbance.next_steps,
            "device_memory": on_device.nbytes if settings.device == "cuda" else None,
            "memory": max(0, peak.nbytes - start_memory),
            "bytes": sum(os.path.getsize(name) for name in files_of(path)),
            "files": sum(1 for _ in files_of(path)),
            "state_bytes": nbytes_of(state),
            "tensors": len(state),
            **saver.facts(path),
            **_loads(saver, path, settings.cold),
        }
        remove(path)
        return found
    finally:
        saver.close()


def make_saver(name: str, state: State) -> Saver:
    """The saver of a row; imports what it needs, which may not be there."""
    if ROWS[name].family == "ours":
        from .ours import Ours

        return Ours(state, ROWS[name].preset, ROWS[name].overrides)
    if ROWS[name].family == "torch":
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


def timed_save(saver: Saver, path: str, fsyncs: bool) -> tuple[float, float, float, float]:
    """Save once.

    Args:
        saver: who saves.
        path: a new path.
        fsyncs: whether the saver syncs its files; otherwise they are synced here, on the clock of `durable`.

    Returns:
        Seconds from the call: stall, staged, complete, durable.
    """
    settle(saver.state)  # what came before is not the save's
    started = time.perf_counter()
    saver.save(path)
    stall = time.perf_counter() - started
    saver.wait_staged()
    staged = time.perf_counter() - started
    saver.finish()
    complete = time.perf_counter() - started
    if not fsyncs:
        sync_tree(path)
        return stall, staged, complete, time.perf_counter() - started
    return stall, staged, complete, complete


def _loads(saver: Saver, path: str, cold: bool) -> dict[str, Any]:
    # Touched, so that a load does not pay for the pages of its target.
    target = {key: torch.empty_like(value).fill_(math.nan) for key, value in saver.state.items()}
    found: dict[str, Any] = {"load_cold": None}
    if cold:
        drop_cache(path)
        found["load_cold"] = _timed_load(saver, path, target)
    fill_cache(path)
    found["load_warm"] = _timed_load(saver, path, target)
    # One update came after the save: a snapshot that is whole is behind by 1 everywhere.
    found["torn"] = sum(not torch.equal(target[key] + 1, value) for key, value in saver.state.items())
    return found


def _timed_load(saver: Saver, path: str, target: State) -> float:
    started = time.perf_counter()
    saver.load(path, target)
    settle(target)
    return time.perf_counter() - started


def _medians(saves: list[tuple[float, float, float, float]]) -> list[float]:
    return [sorted(column)[(len(column) - 1) // 2] for column in zip(*saves, strict=True)]
