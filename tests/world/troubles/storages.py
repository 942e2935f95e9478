"""What happens to the folder of the run: faults of calls, and damage."""

from __future__ import annotations

import errno

from world.trouble import ANYWHERE, Hit, happens

from ckpt_component.testing import Fault, SimulatedObjects

#: Operations that need room.
_NEED_ROOM = ("write", "create", "make_folder", "append", "put", "part", "complete")


@happens("change")
def fails(hit: Hit) -> Fault:
    """An operation does nothing, and says so."""
    hit.world.has_died()
    return Fault("fail")


@happens("change")
def fails_from_then_on(hit: Hit) -> None:
    """So do all later ones, until the job has ended."""
    hit.world.lasting = Fault("fail")
    hit.world.local.has_lost = True
    hit.world.local.may_be_late()
    hit.world.has_died()


@happens("change", names=_NEED_ROOM)
def is_full(hit: Hit) -> Fault:
    """There is no room."""
    hit.world.has_died()
    return Fault("fail", errno.ENOSPC)


@happens("change", names=_NEED_ROOM)
def stays_full(hit: Hit) -> None:
    """There is no room any more, until the job has ended."""
    hit.world.lasting = Fault("fail", errno.ENOSPC)
    hit.world.local.has_lost = True
    hit.world.local.may_be_late()
    hit.world.has_died()


@happens("change")
def answer_lost(hit: Hit) -> Fault:
    """An operation is done, and seems to have failed."""
    hit.world.has_died()
    return Fault("lost")


@happens("change", storages=("bucket",), is_harmless=True)
def done_twice(hit: Hit) -> Fault:
    """A request is done, and then once more, as its answer was lost."""
    return Fault("twice")


@happens(*ANYWHERE, storages=("bucket",), is_harmless=True)
def stale(hit: Hit) -> None:
    """Listings lag behind for a while."""
    objects = hit.world.files.disk
    assert isinstance(objects, SimulatedObjects)
    objects.lag, objects.lag_seconds = hit.world.choice(3, 20), hit.world.choice(0.1, 2.0)


@happens("change")
def flip(hit: Hit) -> None:
    """A bit of the newest checkpoint changes."""
    hit.world.flip()
