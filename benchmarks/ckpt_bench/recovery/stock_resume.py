"""A way back with `torch.distributed.checkpoint` as it comes, written by hand."""

from __future__ import annotations

import os
import re
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from .marks import now
from .resume import Resume, Resumed
from .trained_model import TrainedModel

_NAME = re.compile(r"step-(\d+)")


class StockResume(Resume):
    """Saves with `dcp.save` and restores with `dcp.load`; see `Resume`. A checkpoint is whole if it has `.metadata`."""

    def __init__(
        self, model: TrainedModel, folder: str, every_steps: int, *, is_whole: bool, overrides: list[str]
    ) -> None:
        self._model, self._folder, self._every_steps = model, folder, every_steps

    def restore(self) -> Resumed:
        """See `Resume`."""
        began = now()
        names = map(_NAME.fullmatch, os.listdir(self._folder) if os.path.isdir(self._folder) else [])
        steps = [int(name[1]) for name in names if name and os.path.exists(self._path(int(name[1]), ".metadata"))]
        if not steps:
            return Resumed(None, None, {})
        found = now()
        state = self._state()
        dcp.load(state, checkpoint_id=self._path(max(steps)))
        self._model.optimizer.load_state_dict(state["optimizer"])
        return Resumed(max(steps), None, {"find": found - began, "copy": now() - found})

    def step_ended(self, step: int) -> None:
        """See `Resume`."""
        if step % self._every_steps == 0:
            dcp.save(self._state(), checkpoint_id=self._path(step))
            if dist.is_initialized():
                dist.barrier()

    def _state(self) -> dict[str, Any]:
        return {"model": self._model.module.state_dict(), "optimizer": self._model.optimizer.state_dict()}

    def _path(self, step: int, *names: str) -> str:
        return os.path.join(self._folder, f"step-{step}", *names)

    def close(self) -> None:
        """See `Resume`."""
