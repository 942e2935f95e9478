"""`none`: no snapshot at all. The writer reads the live tensors while the trainer waits."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

from ..image.live import LiveSource
from ..image.tree import flatten
from .base import Snapshot, Stager


class LiveStager(Stager):
    """Needs no memory, and `caller=inline`: nothing may change until the save has been written."""

    option: ClassVar[str] = "none"
    takes_snapshot: ClassVar[bool] = False

    def stage(self, state_dict: Mapping[Any, Any]) -> Snapshot:
        """Lay the state out; its tensors are read when the writer comes to them."""
        started = time.perf_counter()
        flat = flatten(state_dict)
        plan = self._plan_for(flat)
        snapshot = Snapshot(plan.layout, plan.seal(flat.objects), LiveSource(plan.layout, flat.tensors), started)
        snapshot.mark_staged()
        return snapshot
