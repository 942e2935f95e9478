"""The managers that a Hydra job builds, recorded for its report. Nothing is kept unless a report asked for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .manager import CheckpointManager

_managers: list[CheckpointManager] | None = None


def start() -> None:
    """Record the managers that are built from now on."""
    global _managers
    _managers = []


def record(manager: CheckpointManager) -> None:
    """Keep a manager for the report, if one was asked for. The factory calls this with every manager."""
    if _managers is not None:
        _managers.append(manager)


def stop() -> list[CheckpointManager]:
    """The managers since `start`, oldest first. From now on none is kept."""
    global _managers
    managers, _managers = _managers or [], None
    return managers
