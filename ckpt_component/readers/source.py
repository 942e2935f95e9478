"""What every kind of checkpoint looks like to the reader: tensors and objects by key, and a way to read them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointLoadError
from ..state.dense_tensors import plain_address
from ..state.flatten import Path
from ..state.shards import Box


class TensorEntry(NamedTuple):
    """A tensor in a checkpoint. `same_as` is equal for those that are stored once."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    same_as: Any


class Request(NamedTuple):
    """Read the tensor `key`, or a part of it, into `destination`, whose shape and dtype are right.

    Attributes:
        destination: any device, any strides.
        offsets: where the part begins in the whole, one per dimension; None: the whole is read.
        address: the destination's `plain_address`.
    """

    key: str
    destination: torch.Tensor
    offsets: tuple[int, ...] | None
    address: int | None

    @classmethod
    def into(cls, key: str, destination: torch.Tensor, offsets: tuple[int, ...] | None = None) -> Request:
        """Read into this tensor."""
        return cls(key, destination, offsets, plain_address(destination))

    @property
    def box(self) -> Box:
        """The part as (offsets, sizes)."""
        return self.offsets or (0,) * self.destination.dim(), tuple(self.destination.shape)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """What is asked for, of the whole tensor."""
        offsets, sizes = self.box
        for dimension, (start, count) in enumerate(zip(offsets, sizes, strict=True)):
            whole = whole.narrow(dimension, start, count)
        return whole


def copy_into(destination: torch.Tensor, value: torch.Tensor, key: str) -> None:
    """Copy a value into (a part of) the target's tensor.

    Raises:
        CheckpointLoadError: torch cannot do it, as into a tensor that was made under `inference_mode`.
    """
    try:
        destination.copy_(value)
    except RuntimeError as error:
        raise CheckpointLoadError(f"'{key}' in the target cannot be filled: {error}") from error


@dataclass
class Index:
    """What a checkpoint holds, by flat key.

    Attributes:
        tensors: tensors by key.
        objects: paths of Python objects by key.
        containers: as `FlatState.containers`, for giving back the nested form.
    """

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    objects: dict[str, Path] = field(default_factory=dict)
    containers: list[tuple[Path, str]] = field(default_factory=list)

    def paths(self) -> list[tuple[str, Path]]:
        """All keys, each with its path."""
        return [*zip(self.tensors, map(attrgetter("path"), self.tensors.values()), strict=True), *self.objects.items()]

    def path_of(self, key: str) -> Path:
        """Where the value of a key stands."""
        entry = self.tensors.get(key)
        return self.objects[key] if entry is None else entry.path


class Source(ABC):
    """One checkpoint, opened.

    Attributes:
        where: its path.
        index: what it holds.
    """

    where: str
    index: Index

    @abstractmethod
    def read_tensors(self, requests: Sequence[Request]) -> None:
        """Fill all destinations.

        Raises:
            CheckpointCorruptError: the bytes are not those that were written.
        """

    @abstractmethod
    def read_objects(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """The Python objects of these keys."""

    def tied(self, key: str) -> torch.Tensor | None:
        """A tensor that is loaded already and may be handed out as it is, or None."""
        return None
