"""The interface of a checkpoint of any format: an index of tensors and objects by key, and methods to read them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ..core.progress import Progress, no_progress
from ..core.state.boxes import Box
from ..core.state.dense_tensors import plain_address
from ..core.state.paths import Path
from ..errors import CheckpointLoadError


class TensorEntry(NamedTuple):
    """A tensor in a checkpoint. Tensors that share one stored copy have equal `same_as`."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    same_as: Any


class Request(NamedTuple):
    """A request to read the tensor `key`, or a part of it, into `destination`.

    Attributes:
        destination: A tensor of matching shape and dtype, with any device and strides.
        offsets: Offsets of the part in the whole, one per dimension; None: the whole is read.
        address: The destination's `plain_address`.
    """

    key: str
    destination: torch.Tensor
    offsets: tuple[int, ...] | None
    address: int | None

    @classmethod
    def into(cls, key: str, destination: torch.Tensor, offsets: tuple[int, ...] | None = None) -> Request:
        """A request for this tensor as destination."""
        return cls(key, destination, offsets, plain_address(destination))

    @property
    def box(self) -> Box:
        """The part as (offsets, sizes)."""
        return self.offsets or (0,) * self.destination.dim(), tuple(self.destination.shape)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """The requested part of the whole tensor."""
        offsets, sizes = self.box
        for dimension, (start, count) in enumerate(zip(offsets, sizes, strict=True)):
            whole = whole.narrow(dimension, start, count)
        return whole


def copy_into(destination: torch.Tensor, value: torch.Tensor, key: str) -> None:
    """Copy a value into a tensor of the target, or a part of one.

    Raises:
        CheckpointLoadError: torch refuses the copy, such as into a tensor created under `inference_mode`.
    """
    try:
        destination.copy_(value)
    except RuntimeError as error:
        raise CheckpointLoadError(f"'{key}' in the target cannot be filled: {error}") from error


@dataclass
class Index:
    """The contents of a checkpoint, by flat key.

    Attributes:
        tensors: Tensors by key.
        objects: Paths of Python objects by key.
        containers: As `FlatState.containers`, to rebuild the nested form.
    """

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    objects: dict[str, Path] = field(default_factory=dict)
    containers: list[tuple[Path, str]] = field(default_factory=list)

    def paths(self) -> list[tuple[str, Path]]:
        """All keys with their paths."""
        return [*zip(self.tensors, map(attrgetter("path"), self.tensors.values()), strict=True), *self.objects.items()]

    def path_of(self, key: str) -> Path:
        """The path of a key's value."""
        entry = self.tensors.get(key)
        return self.objects[key] if entry is None else entry.path


class Source(ABC):
    """An opened checkpoint.

    Attributes:
        where: Its path.
        index: Its contents.
    """

    where: str
    index: Index

    @abstractmethod
    def read_tensors(self, requests: Sequence[Request], progress: Progress = no_progress) -> None:
        """Fill all destinations.

        Args:
            requests: What to read, and where to.
            progress: Follows the bytes.

        Raises:
            CheckpointCorruptError: The stored bytes are damaged.
        """

    @abstractmethod
    def read_objects(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """The Python objects of these keys."""

    def tied(self, key: str) -> torch.Tensor | None:
        """A tensor that is already loaded and can be returned as it is, or None."""
        return None
