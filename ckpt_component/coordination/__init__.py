"""How ranks agree on one decision per save."""

from .coordinator import Coordinator, LocalCoordinator

__all__ = ["Coordinator", "LocalCoordinator"]
