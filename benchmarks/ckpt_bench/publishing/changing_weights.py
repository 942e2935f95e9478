"""Weights of which a training step changes a few: in bfloat16, most updates are too small to change a weight."""

from __future__ import annotations

import math

import torch

from ..measure.states import STATES

#: The part of the elements of each tensor that a step changes.
CHANGED = 0.02
_WEIGHTS = "model."
_SCALE = 0.02
_POOL = 1 << 20
_BITS = {2: torch.int16, 4: torch.int32}


class ChangingWeights:
    """A state of the benchmark, with values as weights have them.

    Args:
        name: a name of `STATES`; what it calls `model.` is the weights, or if it calls nothing so, all of it

    Attributes:
        content: what is saved: `model`, the weights; and `optimizer`, the rest
        tensors: the weights
        nbytes: bytes of them
    """

    def __init__(self, name: str) -> None:
        self._places: dict[int, torch.Tensor] = {}
        self._random = torch.Generator("cpu").manual_seed(1)
        pool = torch.randn(_POOL, generator=self._random, dtype=torch.float32, device="cpu") * _SCALE
        tensors = {}
        for key, shape, dtype in STATES[name]():
            count = math.prod(shape)
            tensor = torch.empty(count, dtype=dtype, device="cpu")
            for start in range(0, count, _POOL):
                part = tensor[start : start + _POOL]
                part.copy_(pool[: len(part)])
            tensors[key] = tensor.view(shape)
        weights = {key.removeprefix(_WEIGHTS): value for key, value in tensors.items() if key.startswith(_WEIGHTS)}
        rest = {key: value for key, value in tensors.items() if not key.startswith(_WEIGHTS)}
        self.content = {"model": weights, "optimizer": rest} if weights else {"model": rest}
        self.tensors = [*self.content["model"].values()]
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors)

    def step(self) -> None:
        """Change `CHANGED` of the elements of each weight, at random places, to the next value above or below."""
        for number, tensor in enumerate(self.tensors):
            bits = tensor.view(-1).view(_BITS[tensor.element_size()])
            if number not in self._places:
                self._places[number] = self._draw(len(bits))
            # Other places in each step, without the time to draw them, which a loop of training would show.
            moved = int(torch.randint(0, len(bits), (), generator=self._random, dtype=torch.int64, device="cpu"))
            places = (self._places[number] + moved) % len(bits)
            sign = 1 if moved % 2 else -1
            bits[places] = bits[places] + sign

    def _draw(self, count: int) -> torch.Tensor:
        # So many draws hit that part of the places, some of them more than once.
        draws = (math.ceil(-math.log1p(-CHANGED) * count),)
        drawn = torch.randint(0, count, draws, generator=self._random, dtype=torch.int64, device="cpu")
        places: torch.Tensor = torch.unique(drawn)
        return places


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, without a copy."""
    return tensor.view(-1).view(torch.uint8).numpy().data
