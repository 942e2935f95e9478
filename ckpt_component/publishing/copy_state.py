"""`CopyState`: which version a local folder of weights is at. It lies in the folder, and moves with it."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass

from ..core.storage.storage import Storage

logger = logging.getLogger(__name__)

#: Name of the state in the folder.
STATE = ".ckpt-version.json"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class CopyState:
    """The state of a folder.

    Attributes:
        source: path or URL of the versions that it comes from
        version: number of the version
        attempt: token of the commit of that version: another one with this number is another version
        step: training step of the version; None: unknown
        options: digest of what selected and cast the weights
    """

    source: str
    version: int
    attempt: str
    step: int | None = None
    options: str = ""

    def encode(self) -> bytes:
        """The content of the file."""
        return (json.dumps(asdict(self), sort_keys=True) + "\n").encode()


def read_state(storage: Storage, folder: str) -> CopyState | None:
    """The state of a folder; None: it has none, or, with a warning, a damaged one.

    Raises:
        OSError: it cannot be read
    """
    path = os.path.join(folder, STATE)
    try:
        data = storage.read(path, _MAX_BYTES)
    except FileNotFoundError:
        return None
    try:
        state = CopyState(**json.loads(data))
        if type(state.version) is not int or not isinstance(state.source, str):
            raise ValueError("its values have other types")
    except (ValueError, TypeError, RecursionError) as error:
        logger.warning("%s is damaged (%s); the folder gets a whole version", path, error)
        return None
    return state
