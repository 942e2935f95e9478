"""The cost of one rank's save and load by the number of items. Tensors are small, so Python dominates."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from statistics import median_low
from typing import Any

import torch

from ckpt_component.config import compose_checkpoint
from ckpt_component.core.commit.names import MANIFEST, integrity_name
from ckpt_component.core.coordination.question import pack
from ckpt_component.core.gc_control import collector_paused
from ckpt_component.core.image.arena import Arena
from ckpt_component.core.image.copy import CopyPlan, CopyTasks, sources_of
from ckpt_component.factory.graph import build_checkpointer
from ckpt_component.formats.dcp import DcpWriter
from ckpt_component.formats.zip_records import around_payload
from ckpt_component.state.flatten import flatten
from ckpt_component.state.structure import Structure

from ..measure.target_files import fill_cache, remove

_SECONDS = 600
#: Shapes repeat after this many items, so that the tensors stay small.
_ROWS, _COLUMNS = 64, 64


def make_items(count: int) -> dict[str, Any]:
    """A state of `count` bfloat16 tensors of 2 bytes to 8 KB, of at most 4,096 shapes, and one number."""
    layers: dict[str, Any] = {}
    for number in range(count):
        shape = (1 + number % _ROWS, 1 + number // _ROWS % _COLUMNS)
        layers.setdefault(f"layer_{number // 100}", {})[f"weight_{number % 100}"] = torch.ones(
            shape, dtype=torch.bfloat16, device="cpu"
        )
    return {"model": layers, "step": 1}


def measure_items(count: int, saves: int, folder: str) -> Iterator[dict[str, float]]:
    """Costs of one rank with `count` small tensors, in total seconds and bytes.

    Args:
        count: number of tensors
        saves: number of saves after the first; their median counts
        folder: where to save; empty before and after

    Yields:
        Costs by the names of `costs.COSTS`.
    """
    state = make_items(count)
    yield {"templates": _seconds(lambda: _templates(count))}
    with collector_paused(), torch.no_grad():
        planned = _planned(state, saves)
    yield planned
    yield _saved(state, saves, folder)


def _templates(count: int) -> None:
    """As many shapes as items, none of which `make_items` has."""
    around_payload.cache_clear()
    for number in range(count):
        around_payload(torch.float32, torch.Size((number + 1,)))


def _planned(state: dict[str, Any], saves: int) -> dict[str, float]:
    """The planning of the first save, step by step, and the part repeated in later ones."""
    writer = DcpWriter()
    started = time.perf_counter()
    flat = flatten(state)
    structure = Structure(flat)
    surveyed = time.perf_counter()
    plan = writer.plan(structure, 0)
    laid_out = time.perf_counter()
    encoded = plan.encode_objects(flat.objects)
    described = time.perf_counter()
    writer.index([encoded.rank_index()])
    indexed = time.perf_counter()
    arena = Arena(plan.layout.arena_bytes, shared=False)
    slots = arena.slots(plan.layout)
    copies = CopyPlan(slots, sources_of(plan.layout, flat)[0])
    threads = torch.get_num_threads()
    CopyTasks(copies, *sources_of(plan.layout, flat)).finish(threads)
    walks, checks, stages = [], [], []
    for _ in range(saves):
        began = time.perf_counter()
        flat = flatten(state)
        walked = time.perf_counter()
        if not structure.matches(flat):
            raise RuntimeError("The structure did not match an unchanged state.")
        plan.encode_objects(flat.objects)
        checked = time.perf_counter()
        CopyTasks(copies, *sources_of(plan.layout, flat)).finish(threads)
        walks.append(walked - began)
        checks.append(checked - walked)
        stages.append(time.perf_counter() - checked)
    del slots, copies
    arena.close()
    return {
        "survey": surveyed - started,
        "layout": laid_out - surveyed,
        "describe": described - laid_out,
        "index": indexed - described,
        "walk": median_low(walks),
        "check": median_low(checks),
        "stage": median_low(stages),
        "catalog_bytes": float(len(pack(encoded.rank_index()))),
    }


def _saved(state: dict[str, Any], saves: int, folder: str) -> dict[str, float]:
    """Complete saves and loads, as in a training script."""
    found: dict[str, float] = {}
    with build_checkpointer(compose_checkpoint("async_persistent", ["checkpoint.durability=process_crash"])) as ours:
        calls, whole = [], []
        for number in range(saves + 1):
            path = os.path.join(folder, f"save-{number}")
            started = time.perf_counter()
            futures = ours.save(state, path)
            calls.append(time.perf_counter() - started)
            if futures is not None:
                futures[1].result(_SECONDS)
            whole.append(time.perf_counter() - started)
            if number < saves:
                remove(path)
        found["first_stall"], found["stall"] = calls[0], median_low(calls[1:])
        found["first_save"], found["save"] = whole[0], median_low(whole[1:])
        names = {"metadata_bytes": ".metadata", "integrity_bytes": integrity_name(0), "manifest_bytes": MANIFEST}
        found |= {figure: float(os.path.getsize(os.path.join(path, name))) for figure, name in names.items()}
        fill_cache(path)
        found["first_load"] = _seconds(lambda: ours.load(path, state, strict=True))
        found["load"] = median_low([_seconds(lambda: ours.load(path, state, strict=True)) for _ in range(saves)])
        remove(path)
    return found


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
