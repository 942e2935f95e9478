"""How ranks agree on one decision."""

from .calls import StepQuestions
from .coordinator import Coordinator, LocalCoordinator, distributed
from .hosts import Hosts
from .polled_coordinator import PolledCoordinator
from .rank_store import RankStore
from .store_coordinator import StoreCoordinator

__all__ = [
    "Coordinator",
    "Hosts",
    "LocalCoordinator",
    "PolledCoordinator",
    "RankStore",
    "StepQuestions",
    "StoreCoordinator",
    "distributed",
]
