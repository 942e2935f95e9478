"""One record per save and load of a run, in a JSONL file beside the checkpoints and for listeners.

Imports no torch, so that `ckpt` reads the records on any machine.
"""

from .checked import checked_events
from .event_file import FOLDER, EventFile, read_events
from .listener import CheckpointListener
from .recorder import EventRecorder
from .reports import LoadReport, SaveReport

__all__ = [
    "FOLDER",
    "CheckpointListener",
    "EventFile",
    "EventRecorder",
    "LoadReport",
    "SaveReport",
    "checked_events",
    "read_events",
]
