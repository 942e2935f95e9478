"""A run that publishes its weights, which a host receives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from world.weights import KEPT, MIRROR, VERSIONS, WHOLE_EVERY

if TYPE_CHECKING:
    from world.world import Rank

PUBLISHES = (
    f"checkpoint.publish.to={VERSIONS}",
    f"checkpoint.publish.mirror={MIRROR}",
    f"checkpoint.publish.whole_every={WHOLE_EVERY}",
    f"checkpoint.publish.keep={KEPT}",
    "checkpoint.publish.prefix=shared",
    "checkpoint.publish.timeout=100",
    "checkpoint.events=true",  # they say what was published
)


def train_and_publish(rank: Rank) -> None:
    """A host follows each job."""
    if rank.number == 0 and rank.job.name == "job":
        rank.world.weights.follow(rank.job)
    with rank.manager() as manager:
        last = rank.restore(manager)
        for step in range(last + 1, last + 5):
            rank.sleep(1.0)
            rank.save(manager, step)
