"""What the processes of test_job.py run: they answer requests."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ckpt_component.core.processes.framing import Channel
from ckpt_component.core.processes.serve import Reply, answer_requests, failed_frame, serve


def main() -> None:
    serve(answer_all, on_orphan="exit" if os.environ.get("ONCE") else "finish")


def answer_all(job: dict[str, Any], parent: Channel) -> dict[str, Any] | None:
    if job["how"] == "once":
        return work(job)
    if job["how"] == "never":
        time.sleep(60)
    elif job["how"] == "leave":
        sys.exit(3)
    elif job["how"] == "fail":
        parent.send(failed_frame(ValueError("not today")))
    elif job["how"] != "silent":
        parent.send({})
    answer_requests(parent, {}, lambda each: iter([Reply(work(each.header), [each.blob])]), field="request")
    return None


def work(request: dict[str, Any]) -> dict[str, Any]:
    kind = request["request"]
    if kind == "fail":
        raise OSError(28, "No space left on device")
    if kind == "leave":
        sys.exit(request["code"])
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "sleep":
        try:
            Path(request["leaves"]).with_suffix(".began").touch()
            time.sleep(60)
        finally:
            Path(request["leaves"]).touch()
    return {"pid": os.getpid()} if kind == "pid" else {"got": request}
