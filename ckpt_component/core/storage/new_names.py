"""New names beside a file or folder, which no other process or host uses."""

from __future__ import annotations

import hashlib
import os

from ..outside import OUTSIDE, Outside
from ..processes.running import ProcessName

NEW_PREFIX = ".ckpt-new."


def new_token(outside: Outside = OUTSIDE) -> str:
    """Create the identity of a save attempt: a hash of the host name and a random part.

    Args:
        outside: of this host, where the random part comes from
    """
    return f"{host_token(outside)}-{outside.random_bytes(4).hex()}"


def new_path(path: str, outside: Outside = OUTSIDE) -> str:
    """A new path next to the file `path`, for the bytes that are about to replace it; names this process."""
    name = f"{NEW_PREFIX}{os.path.basename(path)}.{ProcessName.current(outside).key}.{new_token(outside)}"
    return os.path.join(os.path.dirname(path), name)


def host_token(outside: Outside = OUTSIDE) -> str:
    """The part of every token that says which host made it."""
    return hashlib.sha256(outside.host_name().encode()).hexdigest()[:8]
