"""How ranks agree on one decision per save."""

from .coordinator import Coordinator, LocalCoordinator, ranks_failed
from .rank_store import RankStore
from .store_coordinator import StoreCoordinator

__all__ = ["Coordinator", "LocalCoordinator", "RankStore", "StoreCoordinator", "ranks_failed"]
