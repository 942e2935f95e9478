"""The managers that a run builds, for a report of the run. Nothing is kept unless a report asked for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .manager import CheckpointManager

_managers: list[CheckpointManager] | None = None


def collect() -> None:
    """Keep the managers that are built from now on."""
    global _managers
    _managers = []


def note(manager: CheckpointManager) -> None:
    """Called with every manager that is built."""
    if _managers is not None:
        _managers.append(manager)


def collected() -> list[CheckpointManager]:
    """The managers since `collect`, oldest first; keeps none of them any longer."""
    global _managers
    managers, _managers = _managers or [], None
    return managers
