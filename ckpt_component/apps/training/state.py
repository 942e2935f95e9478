"""The random generators, which are checkpointed beside weights and optimizer."""

from __future__ import annotations

import logging
from typing import Any

import torch

logger = logging.getLogger(__name__)


class RngState:
    """The random generators of torch: on the CPU, and on one CUDA device.

    Every key is there always, so that a checkpoint of a CPU run resumes on CUDA and the other way round.

    Args:
        device: where training runs.
        alike: whether all ranks must draw the same numbers (True), or should not (False); None: there is one rank.
    """

    def __init__(self, device: torch.device, alike: bool | None = None) -> None:
        self._device = device
        self._alike = alike

    def state_dict(self) -> dict[str, Any]:
        """The generators' states; None for a device that this process does not use."""
        # Bytes and not a tensor: a tensor that only some checkpoints have could not be asked for.
        cuda = bytes(torch.cuda.get_rng_state(self._device).tolist()) if self._device.type == "cuda" else None
        return {"torch": torch.get_rng_state(), "cuda": cuda, "alike": self._alike is not False}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators; those that a checkpoint has no state of keep theirs.

        States that were alike on all ranks are not taken where they must differ, nor the other way round.
        """
        if self._alike is not None and state["alike"] != self._alike:
            logger.info("random generators start from train.seed: the checkpoint is of another way to share the work")
            return
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and self._device.type == "cuda":
            torch.cuda.set_rng_state(torch.tensor(list(state["cuda"]), dtype=torch.uint8), self._device)
