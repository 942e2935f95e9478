"""The process that uploads the checkpoints of a run. It outlives the run, for a bounded time.

The run sends a frame when there is a new checkpoint, and hangs up when it ends. What to upload follows from the
contents of the two folders, so the process may be killed at any time, and a later one continues the upload.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from ..core.outside import OUTSIDE, Outside
from ..core.processes.framing import Channel
from ..core.processes.serve import serve
from ..errors import CheckpointError, CheckpointFencedError
from .jobs import RunWatch
from .upload_policy import UploadPolicy
from .uploading import Uploader, Uploading


def main(outside: Outside = OUTSIDE) -> None:
    """Upload until the run has ended and all is there, or `finish_seconds` later. The job is an `UploadPolicy`.

    Each message is one of: `remote`, the newest step that is in the target; `began`, a step whose upload begins;
    `uploaded` or, of the files of a host that does not commit, `sent`, with `bytes` and `seconds`; `failed`, with the
    `error`; `fenced`: another run has taken over.
    """
    serve(partial(upload, Uploader), on_orphan="finish", outside=outside)


def upload(uploader: Callable[..., Uploading], job: dict[str, Any], parent: Channel) -> None:
    """Upload until it is over.

    Args:
        uploader: what does; made with the arguments of `Uploading`
        job: the policy
        parent: the connection to the run
    """
    logging.disable(logging.WARNING)  # the run logs what matters
    policy = UploadPolicy.of(job)
    storage_of, report = parent.outside.storage_of, parent.send
    run = RunWatch(policy, None if storage_of is None else storage_of(policy.source))
    parent.outside.start("ckpt-run-watch", run.watch, parent, report)
    try:
        uploader(policy, run, report, storage_of).run()
    except CheckpointFencedError as error:
        report({"fenced": str(error)})
    except (CheckpointError, OSError) as error:
        report({"failed": None, "error": str(error)})
