"""What the processes of test_children.py run: the environment says the policy, the job what to write when."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from ckpt_component.core.processes.framing import Channel
from ckpt_component.core.processes.serve import serve


def main() -> None:
    serve(work, on_orphan="exit" if os.environ["ON_ORPHAN"] == "exit" else "finish")


def work(job: dict[str, Any], parent: Channel) -> None:
    parent.send({"pid": os.getpid(), "job": job})
    if os.environ["ON_ORPHAN"] == "exit":
        try:
            time.sleep(60)
        finally:
            Path(job["path"]).write_text("tidied up")
    else:
        while (frame := parent.receive()) is not None:
            header, blob, fds = frame
            parent.send({"got": header, "bytes": len(blob), "files": len(fds)})
        Path(job["path"]).write_text("finished")
