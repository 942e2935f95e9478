"""The rows of this package, used as in a training script."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from glob import escape as glob_escape, glob

from ckpt_component.core.storage.checksum import find_checksum

from .saver import SECONDS, Saver
from .states import State


class Ours(Saver):
    """A checkpointer of a preset.

    Args:
        state: see `Saver`
        preset: its name
        overrides: what is changed in it
    """

    def __init__(self, state: State, preset: str, overrides: Sequence[str]) -> None:
        from ckpt_component.config import compose_checkpoint
        from ckpt_component.factory.graph import build_checkpointer

        super().__init__(state)
        config = compose_checkpoint(preset, overrides)
        self._arenas = int(config.stager.get("arenas", 0))
        self._checkpointer = build_checkpointer(config)

    def save(self, path: str) -> None:
        """See `Saver`."""
        futures = self._checkpointer.save(self.state, path)
        self.written = None if futures is None else futures[1]

    def wait_staged(self) -> None:
        """See `Saver`."""
        # What a guarded optimizer does before it changes anything. `finish` raises the error of a copy that failed.
        self._checkpointer.wait_staged(SECONDS)

    def load(self, path: str, target: State) -> None:
        """See `Saver`."""
        self._checkpointer.load(path, target, strict=True)

    def facts(self, path: str) -> dict[str, object]:
        """The stager's arenas, the checksum that the items have (what `auto` came to), and what computes it."""
        (integrity,) = glob(os.path.join(glob_escape(path), "integrity-*.json"))
        with open(integrity, encoding="utf-8") as file:
            name = str(json.load(file)["checksum"])
        return {"arenas": self._arenas, "checksum": name, "checksum_by": find_checksum(name).package}

    def close(self) -> None:
        """See `Saver`."""
        self._checkpointer.close()
