"""The managers that a Hydra job builds, recorded for its report. Nothing is kept unless a report asked for it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .manager import CheckpointManager

_managers: ContextVar[list[CheckpointManager] | None] = ContextVar("managers", default=None)


def start() -> None:
    """Record the managers that this job builds from now on."""
    _managers.set([])


def record(manager: CheckpointManager) -> None:
    """Keep a manager for the report, if one was asked for. The factory calls this with every manager."""
    managers = _managers.get()
    if managers is not None:
        managers.append(manager)


def stop() -> list[CheckpointManager]:
    """The managers since `start`, oldest first. From now on none is kept."""
    managers = _managers.get()
    _managers.set(None)
    return managers or []
