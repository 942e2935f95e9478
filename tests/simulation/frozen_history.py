"""Histories of runs that share the files of frozen weights, which change in every way that torch sees or does not."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from faults.invariants import state_of

from ckpt_component.core.commit.manifest import data_folder, read_manifest
from ckpt_component.testing import DiskFile

from .history import Event, History, OpenRun, path_of
from .workloads import largest_file

#: Elements of a weight: four are worth a file of their own.
_SIZE = 66_000


def by_torch(base: dict[str, torch.Tensor], name: str) -> None:
    base[name].add_(1)


def by_data(base: dict[str, torch.Tensor], name: str) -> None:
    base[name].data = base[name].data * 2


def by_numpy(base: dict[str, torch.Tensor], name: str) -> None:
    base[name].numpy()[-1] += 1


def by_foreign_code(base: dict[str, torch.Tensor], name: str) -> None:
    at = base[name].data_ptr() + base[name].nbytes // 2
    ctypes.memset(at, ctypes.string_at(at, 1)[0] ^ 1, 1)


def by_other_storage(base: dict[str, torch.Tensor], name: str) -> None:
    base[name].set_((base[name] + 1).untyped_storage(), 0, base[name].shape, (1,))


def by_resize(base: dict[str, torch.Tensor], name: str) -> None:
    """As FSDP frees and allocates the storage of a parameter."""
    values, storage = base[name].clone(), base[name].untyped_storage()
    if not storage.resizable():  # NumPy has seen it
        return
    storage.resize_(0)
    storage.resize_(values.nbytes)
    base[name].copy_(values + 1)


def by_swap(base: dict[str, torch.Tensor], name: str) -> None:
    """Two weights exchange their storages."""
    other = next(key for key in base if key != name)
    base[name].data, base[other].data = base[other].data, base[name].data


def by_load(base: dict[str, torch.Tensor], name: str) -> None:
    """The same values are copied in place: the version differs, the bytes do not."""
    base[name].copy_(base[name].clone())


def by_offload(base: dict[str, torch.Tensor], name: str) -> None:
    """It goes elsewhere and comes back to other memory."""
    base[name].data = base[name].data.clone()


CHANGES: list[Callable[[dict[str, torch.Tensor], str], None]] = [
    *(by_torch, by_data, by_numpy, by_foreign_code, by_other_storage, by_resize, by_swap, by_load, by_offload)
]


class FrozenHistory(History):
    """A history with frozen weights.

    Args:
        protocol: see `History`
        last: see `History`
        every: see `History`
        best: see `History`
        declared: whether the config says which weights are frozen
        stager: of the runs

    Attributes:
        base: the weights
    """

    def __init__(self, protocol: str, last: int, every: int | None, best: bool, *, declared: bool, stager: str) -> None:
        super().__init__(protocol, last, every, best)
        frozen = ["checkpoint.reuse.frozen=[base.*]"] if declared else []
        self._overrides = (*self._overrides, f"checkpoint/stager={stager}", *frozen)
        self.base = {f"layer{number}": torch.full((_SIZE,), float(number)) for number in range(5)}
        self._states: dict[int, dict[str, Any]] = {}
        self._damaged: list[DiskFile] = []

    def state(self, number: int) -> dict[str, Any]:
        blank = {name: torch.zeros(_SIZE) for name in self.base}
        return {**state_of(number), "base": self._states[number] if number else blank}

    def train(self, number: int) -> dict[str, Any]:
        self._states[number] = {name: value.clone() for name, value in self.base.items()}
        return {**state_of(number), "base": self.base}

    def change(self, number: int, name: str) -> None:
        """Change a weight."""
        CHANGES[number](self.base, name)

    def save(self, run: OpenRun, gap: int, loss: float, event: Event | None) -> None:
        super().save(run, gap, loss, event)
        self._spread()

    def flip(self, step: int) -> None:
        self._damaged.append(self.disk.file(largest_file(self.disk, self._files_of(step))))
        super().flip(step)
        self._spread()

    def check(self) -> None:
        self._spread()
        super().check()

    def settle(self) -> None:
        self._spread()
        super().settle()

    def _spread(self) -> None:
        """A damaged file damages every checkpoint that shares it."""
        damaged = {id(file) for file in self._damaged}
        for step in self.listed if damaged else ():
            below = [path for path in self.disk.walk(self._files_of(step)) if path.endswith(".distcp")]
            if step not in self.flipped and not damaged.isdisjoint(id(self.disk.file(path)) for path in below):
                self._remove([step])
                self.flipped.add(step)

    def _files_of(self, step: int) -> str:
        """The folder of a checkpoint's files; without renames, those of others may be beside it."""
        manifest = read_manifest(self._view(), path_of(step))
        assert manifest is not None
        return data_folder(self._view(), path_of(step), manifest)
