"""The rows of the table: each saves and loads the same state in its own way, in a fresh process."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..factory import build_checkpointer

State = dict[str, torch.Tensor]
#: Saves to a path; returns (stall, durable) in seconds, or with the time until staged in the middle.
Save = Callable[[str], "tuple[float, float, float]"]
Load = Callable[[str], None]

OURS = ("sync", "async_persistent", "async_temporal", "async_zero_overhead")
PEERS = ("torch.save", "dcp.save t1", "dcp.save t2", "dcp.async_save")
ROWS = (*OURS, *PEERS)
#: How many saves count, after the first.
STEADY = 5


def measure(row: str, state: State, folder: str, steady: int = STEADY) -> dict[str, Any]:
    """Run one row: the first save apart, then `steady` more, each to a new path; the last one is loaded.

    Returns:
        Seconds: `first_stall`, `stall`, `staged`, `durable` (medians of the steady ones), `load`.
    """
    warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
    with _saver(row, state) as (save, load):
        figures = []
        for number in range(steady + 1):
            path = os.path.join(folder, f"{number}")
            figures.append(save(path))
            if number < steady:
                _remove(path)
        started = time.perf_counter()
        load(path)
        loaded = time.perf_counter() - started
        _remove(path)
    middle = [sorted(column)[steady // 2] for column in zip(*figures[1:], strict=True)]
    return {
        "first_stall": figures[0][0],
        "stall": middle[0],
        "staged": middle[1],
        "durable": middle[2],
        "load": loaded,
    }


@contextmanager
def _saver(row: str, state: State) -> Iterator[tuple[Save, Load]]:
    if row in OURS:
        with build_checkpointer(row) as checkpointer:
            target = {key: torch.empty_like(value) for key, value in state.items()}
            yield partial(_ours, checkpointer, state), lambda path: _nothing(checkpointer.load(path, target))
    elif row == "torch.save":
        yield partial(_torch_save, state), partial(_torch_load, state)
    elif row.startswith("dcp."):
        yield partial(_dcp_save, row, state), partial(_dcp_load, state)
    else:
        raise ValueError(f"There is no row {row!r}; use {', '.join(ROWS)}.")


def _nothing(_: object) -> None:
    """Throw a result away."""


def _ours(checkpointer: Any, state: State, path: str) -> tuple[float, float, float]:
    started = time.perf_counter()
    futures = checkpointer.save(state, path)
    stall = time.perf_counter() - started
    if futures is None:
        return stall, stall, stall
    futures[0].result(600)
    staged = time.perf_counter() - started
    futures[1].result(600)
    return stall, staged, time.perf_counter() - started


def _torch_save(state: State, path: str) -> tuple[float, float, float]:
    started = time.perf_counter()
    torch.save(state, path)
    stall = time.perf_counter() - started
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
    return stall, stall, time.perf_counter() - started


def _torch_load(state: State, path: str) -> None:
    target = {key: torch.empty_like(value) for key, value in state.items()}
    for key, value in torch.load(path, mmap=True).items():
        target[key].copy_(value)


def _dcp_save(row: str, state: State, path: str) -> tuple[float, float, float]:
    import torch.distributed.checkpoint as dcp

    writer = dcp.FileSystemWriter(path, thread_count=2 if row.endswith("t2") else 1)
    started = time.perf_counter()
    if row == "dcp.async_save":
        future = dcp.async_save(state, storage_writer=writer)
        stall = time.perf_counter() - started
        future.result()  # type: ignore[union-attr]
    else:
        dcp.save(state, storage_writer=writer)
        stall = time.perf_counter() - started
    return stall, stall, time.perf_counter() - started


def _dcp_load(state: State, path: str) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.load({key: torch.empty_like(value) for key, value in state.items()}, checkpoint_id=path)


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)
