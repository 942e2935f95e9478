"""Ways in which weights change that were said to stay, or seemed to: torch sees some of them, and not others."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

Base = dict[str, torch.Tensor]
#: Elements of a weight: four are worth a file of their own.
_SIZE = 66_000


def new_base() -> Base:
    """Weights that do not change by themselves."""
    return {f"layer{number}": torch.full((_SIZE,), float(number)) for number in range(1, 6)}


def by_torch(base: Base, name: str) -> None:
    base[name].add_(1)


def by_data(base: Base, name: str) -> None:
    base[name].data = base[name].data * 2


def by_numpy(base: Base, name: str) -> None:
    base[name].numpy()[-1] += 1


def by_foreign_code(base: Base, name: str) -> None:
    at = base[name].data_ptr() + base[name].nbytes // 2
    ctypes.memset(at, ctypes.string_at(at, 1)[0] ^ 1, 1)


def by_other_storage(base: Base, name: str) -> None:
    base[name].set_((base[name] + 1).untyped_storage(), 0, base[name].shape, (1,))


def by_resize(base: Base, name: str) -> None:
    """As FSDP frees and allocates the storage of a parameter."""
    values, storage = base[name].clone(), base[name].untyped_storage()
    if not storage.resizable():  # NumPy has seen it
        return
    storage.resize_(0)
    storage.resize_(values.nbytes)
    base[name].copy_(values + 1)


def by_swap(base: Base, name: str) -> None:
    """Two weights exchange their storages."""
    other = next(key for key in base if key != name)
    base[name].data, base[other].data = base[other].data, base[name].data


def by_load(base: Base, name: str) -> None:
    """The same values are copied in place: the version differs, the bytes do not."""
    base[name].copy_(base[name].clone())


def by_offload(base: Base, name: str) -> None:
    """It goes elsewhere and comes back to other memory."""
    base[name].data = base[name].data.clone()


CHANGES: list[Callable[[Base, str], None]] = [
    *(by_torch, by_data, by_numpy, by_foreign_code, by_other_storage, by_resize, by_swap, by_load, by_offload)
]
