"""`none`: no snapshot at all. The writer reads the live tensors while the trainer waits."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..image.live import LiveSource
from .base import Snapshot, Stager, StatePlan


class LiveStager(Stager):
    """Needs no memory, and `caller=inline`: nothing may change until the save has been written."""

    option: ClassVar[str] = "none"
    takes_snapshot: ClassVar[bool] = False

    def take(self, plan: StatePlan) -> Snapshot:
        """Lay the state out; its tensors are read when the writer comes to them."""
        format_plan, flat = self._plan_for(plan)
        encoded = format_plan.encode_objects(flat.objects)
        with torch.no_grad():
            source = LiveSource(format_plan.layout, flat)
        snapshot = Snapshot(format_plan.layout, encoded, source)
        snapshot.mark_staged()
        return snapshot
