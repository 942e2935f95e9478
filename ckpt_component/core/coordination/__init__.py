"""How ranks agree on one decision."""

from .calls import StepQuestions
from .coordinator import Coordinator, LocalCoordinator, distributed
from .rank_store import RankStore
from .store_coordinator import StoreCoordinator

__all__ = [
    "Coordinator",
    "LocalCoordinator",
    "RankStore",
    "StepQuestions",
    "StoreCoordinator",
    "distributed",
]
