"""What happens to snapshots in memory, and to the processes that keep them."""

from __future__ import annotations

import os

from world.times import LEASE, LONG, UNNOTICED
from world.trouble import ANYWHERE, Hit, happens

#: For so long nobody uses the sockets of servers.
OPEN_SECONDS = 10.0


@happens(*ANYWHERE, needs=("memory",))
def kill_client(hit: Hit) -> None:
    """A process that keeps snapshots in memory gets SIGKILL."""
    for client in hit.world.clients()[:1]:
        hit.world.lose_memory(client.host)
        client.kill()


@happens(*ANYWHERE, needs=("memory",))
def stop_client(hit: Hit) -> None:
    """A process that keeps snapshots in memory does nothing for a while."""
    for client in hit.world.clients()[:1]:
        hit.world.lose_memory()
        client.stop(25.0)
        hit.world.excuse(25.0 + UNNOTICED)


@happens(*ANYWHERE, needs=("memory",))
def lease_over(hit: Hit) -> None:
    """The time is over for which snapshots stay in memory without a run."""
    for client in hit.world.clients():
        now, outside = client.outside.now, client.outside
        outside.now = lambda now=now: now() + LEASE  # type: ignore[misc]
    hit.world.lose_memory()


@happens(*ANYWHERE, needs=("memory",))
def flip_memory(hit: Hit) -> None:
    """A bit of a snapshot in memory changes."""
    hit.world.flip_memory()


@happens(*ANYWHERE, needs=("memory",))
def open_to_others(hit: Hit) -> None:
    """Others may open the folder of the servers' sockets for a while, so nobody uses it."""
    simulation = hit.world.simulation
    folder, until = simulation.folder, simulation.now + OPEN_SECONDS
    os.chmod(folder, 0o755)
    simulation.at(until, lambda: os.chmod(folder, 0o700))
    hit.world.memory.unwell.append((simulation.now, until))
    # The mark of an attempt that could not be deleted meanwhile stays in a server that lives, and each later restore
    # waits until `timeouts.close` for who would complete it.
    hit.world.excuse(LONG)
