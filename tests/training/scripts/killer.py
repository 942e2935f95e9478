"""A listener that kills a job of a sweep, and all that runs with it, once its step 10 is committed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from ckpt_component.events import CheckpointListener, SaveReport


class Killer(CheckpointListener):
    """Kills its process group in the job whose folder the file `kill` names, in the current folder, and only once."""

    def on_committed(self, report: SaveReport) -> None:
        """A job does not end before its listeners were called, so it does not end at all."""
        note = Path("kill")
        if report.step == 10 and note.exists() and report.path.split("/")[-3] == note.read_text():
            note.unlink()
            os.killpg(0, signal.SIGKILL)
