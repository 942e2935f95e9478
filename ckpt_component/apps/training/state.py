"""What is checkpointed beside weights and optimizer: random generators and counters."""

from __future__ import annotations

import logging
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)


def seed_all(seed: int) -> None:
    """Seed every generator of `RngState`."""
    torch.manual_seed(seed)  # CUDA's too
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


class RngState:
    """The global random generators of this process: torch on CPU and on one CUDA device, Python, numpy.

    Every key is there always, so that a checkpoint of a CPU run resumes on CUDA and the other way round.

    Args:
        device: where training runs.
        alike: whether all ranks must draw the same numbers (True), or should not (False); None: there is one rank.
    """

    def __init__(self, device: torch.device, alike: bool | None = None) -> None:
        self._device = device
        self._alike = alike

    def state_dict(self) -> dict[str, Any]:
        """The generators' states; None for what this process does not use."""
        numpy = sys.modules.get("numpy")
        # Bytes and not a tensor: a tensor that only some checkpoints have could not be asked for.
        cuda = bytes(torch.cuda.get_rng_state(self._device).tolist()) if self._device.type == "cuda" else None
        return {
            "torch": torch.get_rng_state(),
            "cuda": cuda,
            "python": random.getstate(),
            "numpy": None if numpy is None else numpy.random.get_state(),
            "alike": self._alike is not False,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators; those that a checkpoint has no state of keep theirs.

        States that were alike on all ranks are not taken where they must differ, nor the other way round.
        """
        if self._alike is not None and state["alike"] != self._alike:
            logger.info(
                "the random generators start from train.seed: the checkpoint is of another way to share the work"
            )
            return
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        if state["cuda"] is not None and self._device.type == "cuda":
            torch.cuda.set_rng_state(torch.tensor(list(state["cuda"]), dtype=torch.uint8), self._device)
        numpy = sys.modules.get("numpy")
        if state["numpy"] is not None and numpy is not None:
            numpy.random.set_state(state["numpy"])


@dataclass
class Progress:
    """How far training is.

    Attributes:
        step: optimizer steps done.
        tokens: bytes of text trained on.
    """

    step: int = 0
    tokens: int = 0

    def state_dict(self) -> dict[str, Any]:
        """The counters."""
        return {"step": self.step, "tokens": self.tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the counters of a checkpoint."""
        self.step, self.tokens = state["step"], state["tokens"]
