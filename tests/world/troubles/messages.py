"""What happens to requests to the store of the ranks."""

from __future__ import annotations

from world.times import DEADLINE, SOON, UNNOTICED
from world.trouble import Hit, happens

from ckpt_component.testing.simulated_store import MessageFault


@happens("message")
def message_lost(hit: Hit) -> MessageFault:
    """A request to the store does not arrive, and its connection breaks."""
    hit.world.excuse(SOON)
    return MessageFault("lost")


@happens("message")
def answer_of_store_lost(hit: Hit) -> MessageFault:
    """A request to the store is done, and its connection breaks before the answer."""
    hit.world.excuse(SOON)
    return MessageFault("unanswered")


@happens("message")
def message_late(hit: Hit) -> MessageFault:
    """A request to the store arrives late, and so do those behind it."""
    seconds = hit.world.choice(0.1, 3.0, 20.0)
    hit.world.excuse(2 * seconds + UNNOTICED)
    return MessageFault("late", seconds)


@happens("message")
def store_stopped(hit: Hit) -> None:
    """The process of the store does nothing for a while."""
    seconds = hit.world.choice(0.5, 5.0, 25.0)
    hit.rank.job.agent.stop(seconds)
    hit.world.excuse(seconds + UNNOTICED)


@happens("message")
def store_lost(hit: Hit) -> None:
    """The process of the store is gone."""
    hit.rank.job.agent.kill()
    hit.world.excuse(DEADLINE)
