"""The random generators of Python, NumPy and torch."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

#: The states of the generators of Python, NumPy (or None), torch, and torch on each CUDA device. A tuple is one value
#: of a state dict, so that its form does not depend on what is in it.
RandomState = tuple[Any, ...]


def random_state() -> RandomState:
    """The state of the global generators, of plain values and tensors."""
    numpy = sys.modules.get("numpy")  # if it was never imported, nothing has drawn from it
    return (
        random.getstate(),
        None if numpy is None else numpy.random.get_state(),
        torch.get_rng_state(),
        tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else (),
    )


def set_random_state(state: RandomState) -> None:
    """Set the generators to a result of `random_state`. Those of CUDA are unchanged if there are other devices now."""
    python, numpy_state, cpu, cuda = state
    random.setstate(python)
    torch.set_rng_state(cpu)
    if numpy_state is not None:
        import numpy

        numpy.random.set_state(numpy_state)
    if cuda and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(list(cuda))
