"""The state of the random generators, which is checkpointed with weights and optimizer."""

from __future__ import annotations

import logging
from typing import Any

import torch

logger = logging.getLogger(__name__)


class RngState:
    """The random generators of torch, on the CPU and on one CUDA device.

    Its state always has all keys, so that a checkpoint of a CPU run resumes on CUDA and vice versa.

    Args:
        device: device of the training
        alike: whether all ranks must draw the same numbers (True) or different ones (False); None with one rank
    """

    def __init__(self, device: torch.device, alike: bool | None = None) -> None:
        self._device = device
        self._alike = alike

    def state_dict(self) -> dict[str, Any]:
        """The generators' states; None for a device that this process does not use."""
        # Bytes rather than a tensor, because a load cannot request a tensor that only some checkpoints have.
        cuda = bytes(torch.cuda.get_rng_state(self._device).tolist()) if self._device.type == "cuda" else None
        return {"torch": torch.get_rng_state(), "cuda": cuda, "alike": self._alike is not False}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators; those without a state in the checkpoint are unchanged.

        States that were equal on all ranks are ignored if they must differ now, and vice versa.
        """
        if self._alike is not None and state["alike"] != self._alike:
            logger.info("random generators start from train.seed: the checkpoint was saved with another `parallel`")
            return
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and self._device.type == "cuda":
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(state["cuda"]), dtype=torch.uint8), self._device)
