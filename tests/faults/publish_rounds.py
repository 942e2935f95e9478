"""What the forked children run: one version with a failpoint, as the process of a run makes it."""

from __future__ import annotations

import os

from publishing.publish_worlds import publish, publisher

from ckpt_component.core.storage.files import FAILPOINT, FAILPOINT_LOG
from ckpt_component.core.storage.locate import file_storage


def publish_round(root: str, source: str, step: int, delta: str, failpoint: str, log: str) -> int:
    """Publish a checkpoint into `root/to` by the mirror `root/mirror`; returns the number of the version."""
    os.environ |= {FAILPOINT: failpoint, FAILPOINT_LOG: log}
    files = file_storage(process="publish")
    made = publisher(f"{root}/to", f"{root}/mirror", fs=files, process="publish", delta=delta, keep=2, whole_every=3)
    return publish(made, source, step).version
