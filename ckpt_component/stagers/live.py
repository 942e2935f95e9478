"""`none`: no snapshot at all. The writer reads the live tensors while the trainer waits."""

from __future__ import annotations

from typing import ClassVar

from ..image.live import LiveSource
from .base import Stager
from .snapshot import Snapshot, Survey


class LiveStager(Stager):
    """Needs no memory, and `caller=inline`: nothing may change until the save has been written."""

    option: ClassVar[str] = "none"
    takes_snapshot: ClassVar[bool] = False

    def take(self, survey: Survey) -> Snapshot:
        """Lay the state out; its tensors are read when the writer comes to them."""
        plan, flat = self._plan_for(survey)
        source = LiveSource(plan.layout, flat)
        snapshot = Snapshot(plan.layout, plan.seal(flat.objects), source, survey.started)
        snapshot.mark_staged()
        return snapshot
