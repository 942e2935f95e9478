"""A way back with the manager of this package, as in a training script."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from ckpt_component import CheckpointListener, build_manager
from ckpt_component.events import LoadReport

from .marks import now
from .resume import Resume, Resumed
from .trained_model import TrainedModel

#: How long the report of a restore may take to come, in seconds.
_REPORT_SECONDS = 30.0


class _Restored(CheckpointListener):
    """Keeps the report of a restore."""

    def __init__(self) -> None:
        self.report = LoadReport("")
        self.came = threading.Event()

    def on_restored(self, report: LoadReport) -> None:
        self.report = report
        self.came.set()


class ManagedResume(Resume):
    """Saves and restores with a `CheckpointManager`; see `Resume`."""

    def __init__(
        self, model: TrainedModel, folder: str, every_steps: int, *, is_whole: bool, overrides: list[str]
    ) -> None:
        every = [f"checkpoint.save.every_steps={every_steps}", "checkpoint.save.at_end=false"]
        self._manager = build_manager("async_persistent", [*every, *overrides], dir=folder)
        self._manager.guard(model.optimizer)
        self._every_steps = every_steps
        self._state: dict[str, Any] = {"model": model.module, "optimizer": model.optimizer}
        if not is_whole:
            self._state = {"number": torch.zeros(1, dtype=torch.float32, device="cpu")}
        self._restored = _Restored()
        self._manager.add_listener(self._restored)

    def restore(self) -> Resumed:
        """See `Resume`; the phases are those of the `LoadReport`."""
        began, wall = now(), time.time()
        step = self._manager.restore(self._state)
        if step is None:
            return Resumed(None, None, {})
        ended = now()
        if not self._restored.came.wait(_REPORT_SECONDS):
            raise RuntimeError(f"the report of the restore did not come within {_REPORT_SECONDS:g} s")
        report = self._restored.report
        spans = {name: end - begin for name, (begin, end) in report.spans.items()}
        phases = {
            "find": min(report.time - wall, ended - began) + spans.get("open", 0.0),
            "verify": spans.get("verify", 0.0),
            "copy": spans.get("read", 0.0) + spans.get("take", 0.0),
        }
        return Resumed(step, str(getattr(report, "source", "")) or None, phases)

    def step_ended(self, step: int) -> None:
        """See `Resume`."""
        self._manager.maybe_save(step, self._state)
        if step % self._every_steps == 0:
            self._manager.wait()

    def close(self) -> None:
        """See `Resume`."""
        self._manager.close()
