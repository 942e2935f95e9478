"""How ranks agree on one decision per save."""

from .coordinator import Coordinator, LocalCoordinator
from .rank_store import RankStore
from .store_coordinator import StoreCoordinator

__all__ = ["Coordinator", "LocalCoordinator", "RankStore", "StoreCoordinator"]
