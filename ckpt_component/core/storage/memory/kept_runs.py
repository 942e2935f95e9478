"""Which runs have keepers on this host. A run is found by its token, which the owner file of its folder has."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...outside import OUTSIDE, Outside
from .keeper_sockets import SocketPlace, memory_root, roots_here
from .remote_keeper import RemoteKeeper


@dataclass(frozen=True)
class KeptRun:
    """A run that has keepers on this host.

    Attributes:
        token: its token
        memory: the path of its memory
        folder: its folder of checkpoints, as a rank here has spelled it, or the URL
    """

    token: str
    memory: str
    folder: str


def kept_run(token: str, outside: Outside = OUTSIDE) -> KeptRun | None:
    """The run with a token; None: it has no keeper on this host.

    Args:
        token: see above
        outside: of this process

    Raises:
        PermissionError: the folder of the sockets, or a process behind one, is another user's
        TimeoutError: a keeper does not answer
    """
    for place in (SocketPlace(root, each, outside) for root, each in roots_here(outside) if each == token):
        for rank in sorted(place.ranks()):
            with contextlib.suppress(ConnectionError), contextlib.closing(RemoteKeeper(place, rank)) as keeper:
                about = keeper.about()  # all of them say the same, but one that has ended
                return KeptRun(token, memory_of(token, about), str(about["root"]))
    return None


def memory_of(token: str, about: Mapping[str, Any]) -> str:
    """The path of the memory of a run, by what one of its keepers says; an early one does not name it."""
    return str(about.get("memory") or memory_root(about["root"], token))
