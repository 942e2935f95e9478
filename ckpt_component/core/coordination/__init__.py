"""How ranks agree on one decision, and which of them are alive."""

from .coordinator import Coordinator, Hosts, LocalCoordinator, distributed
from .question import StepQuestions
from .rank_store import RankStore
from .store_coordinator import PolledCoordinator, StoreCoordinator

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
