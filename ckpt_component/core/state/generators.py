"""Random generators as objects with a state: of torch, of numpy and of the standard library."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

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
