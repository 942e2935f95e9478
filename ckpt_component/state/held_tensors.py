"""What this rank holds of tensors that are spread over ranks, and of those that are made of tensors."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import CheckpointStageError
from .paths import CONTEXT, Path, key_of
from .shards import Shard, check_mesh, context_of, is_made_of_tensors, local_parts, mesh_of, parts_of
from .tensors import ORDINARY


@dataclass
class HeldTensors:
    """The tensors that have the memory of the tensors of a state.

    Attributes:
        paths: path of each
        tensors: the tensors: whole ones, local parts, and what tensors are made of
        shards: for every tensor, which part of a whole tensor it is; None: it is the whole
        placed: by number, the tensor of the state that it is a part of
        elsewhere: tensors of the state of which this rank holds no part, by path
        made: tensors of the state that are made of tensors, by path
        contexts: what these are beside the tensors that they are made of, by the path to save it at
    """

    paths: list[Path] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    shards: list[Shard | None] = field(default_factory=list)
    placed: dict[int, torch.Tensor] = field(default_factory=dict)
    elsewhere: dict[Path, torch.Tensor] = field(default_factory=dict)
    made: dict[Path, torch.Tensor] = field(default_factory=dict)
    contexts: dict[Path, Any] = field(default_factory=dict)

    def add(self, path: Path, tensor: torch.Tensor, whole: torch.Tensor) -> None:
        """Add what this rank holds of a tensor.

        Args:
            path: its path
            tensor: the tensor, or one that it is made of
            whole: the tensor of the state

        Raises:
            CheckpointStageError: it is a sharded tensor that is made of tensors
        """
        parts = [(tensor, None)] if type(tensor) in ORDINARY else local_parts(tensor, key_of(path))
        if not parts:
            self.elsewhere[path] = tensor
        for part, shard in parts:
            if type(part) in ORDINARY or not is_made_of_tensors(part):
                if part is not whole:
                    self.placed[len(self.tensors)] = whole
                self.paths.append(path)
                self.tensors.append(part)
                self.shards.append(shard)
                continue
            if shard is not None:
                raise CheckpointStageError(
                    f"'{key_of(path)}' is a DTensor that is sharded, and its local part is a {type(part).__name__}, "
                    "made of tensors that are no shards; replicate it, or shard weights and optimizer state of plain "
                    "tensors."
                )
            if tensor is whole:
                self.made[path] = whole
            self.contexts[(*path, CONTEXT)] = context_of(part)
            for name, inner in parts_of(part).items():
                self.add((*path, name), inner, whole)


def held_tensors(paths: Sequence[Path], tensors: Sequence[torch.Tensor], world_size: int | None) -> HeldTensors:
    """What this rank holds of tensors.

    Args:
        paths: path of each
        tensors: the tensors of a state
        world_size: how many ranks save together; None if this is not for a save

    Raises:
        CheckpointStageError: ranks that do not save hold parts of a tensor, or one is sharded in a way that cannot be
            saved
    """
    held = HeldTensors()
    checked = None  # checking a mesh is slow, and most tensors share one
    for path, tensor in zip(paths, tensors, strict=True):
        mesh = mesh_of(tensor)
        if world_size is not None and mesh is not None and mesh is not checked:
            check_mesh(mesh, key_of(path), world_size)
            checked = mesh
        held.add(path, tensor, tensor)
    return held


#: Names of their classes, to tell most values from them at once.
GENERATOR_NAMES = frozenset({"Generator", "RandomState", "Random"})


def is_generator(value: object) -> bool:
    """Whether a value is a generator; one of a subclass is not, as its state may be anything."""
    numpy = sys.modules.get("numpy")  # if numpy was never imported, there are none of its generators
    kinds = (torch.Generator, random.Random)
    return type(value) in (kinds if numpy is None else (*kinds, numpy.random.Generator, numpy.random.RandomState))


class GeneratorState:
    """A generator with `state_dict()` and `load_state_dict()`, which sets it in place.

    Args:
        generator: one that `is_generator`
    """

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        """The state, as the generator's own method returns it; of a generator of numpy, that of its bit generator."""
        generator = self._generator
        if isinstance(generator, torch.Generator):
            return {"state": generator.get_state()}
        if isinstance(generator, random.Random):
            return {"state": generator.getstate()}
        if hasattr(generator, "bit_generator"):
            return dict(generator.bit_generator.state)
        return dict(generator.get_state(legacy=False))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the generator.

        Raises:
            RuntimeError, ValueError, KeyError, TypeError: it is the state of another kind of generator
        """
        generator = self._generator
        if isinstance(generator, torch.Generator):
            generator.set_state(state_dict["state"])
        elif isinstance(generator, random.Random):
            generator.setstate(state_dict["state"])
        elif hasattr(generator, "bit_generator"):
            generator.bit_generator.state = state_dict
        else:
            generator.set_state(state_dict)
