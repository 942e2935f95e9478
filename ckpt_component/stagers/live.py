"""The stager `none`: takes no snapshot; the writer reads the live tensors while the trainer waits."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..core.image.copy import sources_of
from ..core.image.live_source import LiveSource
from .base import Snapshot, Stager, StatePlan


class LiveStager(Stager):
    """Uses no memory, and needs `caller=inline`, because the state must not change until it is written."""

    takes_snapshot: ClassVar[bool] = False

    def take(self, plan: StatePlan) -> Snapshot:
        """Lay out the state; its tensors are read when they are written."""
        format_plan, flat = self._plan_for(plan)
        encoded = format_plan.encode_objects(flat.objects)
        with torch.no_grad():
            source = LiveSource(format_plan.layout, flat)
        layout, unchanged = format_plan.layout, self._reuse.look(format_plan.layout, flat, plan.storage)
        if unchanged is not None:
            sources, _ = sources_of(layout, flat)
            for file in unchanged.candidates:
                unchanged.prove(file, sources)
        snapshot = Snapshot(layout, encoded, source, unchanged=unchanged)
        snapshot.mark_staged()
        return snapshot
