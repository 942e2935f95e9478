"""How ranks agree on one decision per save."""

from .calls import Call, Meetings, StepQuestions
from .coordinator import Coordinator, LocalCoordinator
from .rank_store import RankStore
from .store_coordinator import StoreCoordinator

__all__ = [
    "Call",
    "Coordinator",
    "LocalCoordinator",
    "Meetings",
    "RankStore",
    "StepQuestions",
    "StoreCoordinator",
]
