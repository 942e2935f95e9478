"""A process that makes one export for a training run; it ends with the run."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from typing import Any

from ..core.storage.locate import file_storage
from ..errors import CheckpointError
from ..exporting.export import ExportOptions, export_checkpoint

#: Start this with `-c`, the folder of the package, and JSON: path of the checkpoint, path of the export, options.
CODE = (
    "import sys; sys.path[0] = sys.argv[1]; "
    "from ckpt_component.background.export_process import main; main(sys.argv[2])"
)


def main(job: str) -> None:
    """Make an export, and write `nbytes` and `seconds` to stdout as JSON, or the text of the `error`.

    When stdin has a line or closes, the run has ended: the export is given up, and its files are deleted.
    """
    # Signals to a whole group or job are meant for the trainer.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(1))
    threading.Thread(target=_leave_with_parent, name="ckpt-parent-watch", daemon=True).start()
    logging.disable(logging.WARNING)  # the run logs what matters
    source, target, options = json.loads(job)
    answer: dict[str, Any]
    try:
        fs = file_storage(process="export")
        done = export_checkpoint(source, target, ExportOptions(**options), fs)
        answer = {"nbytes": done.nbytes, "seconds": done.seconds}
    except CheckpointError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)


def _leave_with_parent() -> None:
    os.read(0, 1)  # not sys.stdin, whose lock this thread would hold when the interpreter exits
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
