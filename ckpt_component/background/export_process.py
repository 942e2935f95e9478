"""A process that makes one export for a training run; it ends with the run."""

from __future__ import annotations

import logging
from typing import Any

from ..core.outside import OUTSIDE, Outside
from ..core.processes.framing import Channel
from ..core.processes.serve import serve
from ..core.storage.locate import file_storage
from ..errors import CheckpointError
from ..exporting.export import ExportOptions, export_checkpoint


def main(outside: Outside = OUTSIDE) -> None:
    """Make an export. If the run ends first, the export is given up, and its files are deleted."""
    serve(_export, on_orphan="exit", outside=outside)


def _export(job: dict[str, Any], run: Channel) -> dict[str, Any]:
    """Export from `source` to `target` with `options`; the answer is `nbytes` and `seconds`, or the `error`."""
    logging.disable(logging.WARNING)  # the run logs what matters
    try:
        fs = file_storage(process="export")
        done = export_checkpoint(job["source"], job["target"], ExportOptions(**job["options"]), fs)
    except CheckpointError as error:
        return {"error": str(error)}
    return {"nbytes": done.nbytes, "seconds": done.seconds}
