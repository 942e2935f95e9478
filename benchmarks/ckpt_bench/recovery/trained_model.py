"""What is trained: the weights of a state of the benchmark, and their AdamW."""

from __future__ import annotations

import time

import torch

from ..measure.states import STATES

_WIDTH = 512
_WEIGHTS = "model."


class TrainedModel:
    """A module and its optimizer, whose moments are there from the start, so that each row's first step does the same.

    Args:
        name: a name of `STATES`; its tensors are the weights, or those that it calls `model.` if it has moments too
        step_s: approximate seconds of forward and backward
        on_meta: make the weights on the meta device, and no moments, until they are restored or initialised

    Attributes:
        module: the weights
        optimizer: AdamW, fused
    """

    def __init__(self, name: str, step_s: float, *, on_meta: bool = False) -> None:
        shapes = {key: (shape, dtype) for key, shape, dtype in STATES[name]()}
        shapes = {key: value for key, value in shapes.items() if key.startswith(_WEIGHTS)} or shapes
        self.module = torch.nn.Module()
        for key, (shape, dtype) in shapes.items():
            weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta" if on_meta else "cpu"))
            self.module.register_parameter(key.replace(".", "_"), weight)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3, fused=True)
        if not on_meta:
            self.initialise()
        self._step_s = step_s
        self._left, self._right = (torch.rand(_WIDTH, _WIDTH, dtype=torch.float32, device="cpu") for _ in "ab")

    def initialise(self) -> None:
        """Give the weights and moments the values that they begin with, and memory if they have none."""
        if any(weight.is_meta for weight in self.module.parameters()):
            torch.__future__.set_swap_module_params_on_conversion(True)  # they stay those of the optimizer
            self.module.to_empty(device="cpu")
        same = torch.Generator(device="cpu").manual_seed(0)  # on all ranks
        for weight in self.module.parameters():
            torch.nn.init.normal_(weight, std=0.02, generator=same)
            self.optimizer.state[weight] = {
                "step": torch.zeros((), dtype=torch.float32, device="cpu"),
                "exp_avg": torch.zeros_like(weight),
                "exp_avg_sq": torch.zeros_like(weight),
            }

    @property
    def nbytes(self) -> int:
        """Total size of weights and moments."""
        return sum(3 * weight.nbytes for weight in self.module.parameters())

    def step(self) -> None:
        """Run one step of training: matrix products in place of forward and backward, and the optimizer's step."""
        until = time.perf_counter() + self._step_s
        while time.perf_counter() < until:
            torch.mm(self._left, self._right)
        for weight in self.module.parameters():
            if weight.grad is None:  # as in the first backward
                weight.grad = torch.full_like(weight, 1e-2)
        self.optimizer.step()
