"""Record the managers that a Hydra job builds, for its report. Nothing is recorded unless a report asks for it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .manager import CheckpointManager

_managers: ContextVar[list[CheckpointManager] | None] = ContextVar("managers", default=None)


def start() -> None:
    """Start to record the managers that this job builds."""
    _managers.set([])


def record(manager: CheckpointManager) -> CheckpointManager:
    """Record a manager, if recording was started; returns it. The factory calls this for every manager."""
    managers = _managers.get()
    if managers is not None:
        managers.append(manager)
    return manager


def stop() -> list[CheckpointManager]:
    """Stop recording, and return the managers since `start`, oldest first."""
    managers = _managers.get()
    _managers.set(None)
    return managers or []
