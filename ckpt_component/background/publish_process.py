"""A process that publishes one version for a training run; it ends with the run."""

from __future__ import annotations

import logging
import os
from typing import Any

from ..core.commit.fencing import check_owner
from ..core.commit.manifest import read_manifest
from ..core.commit.scan import scan_steps
from ..core.formats.checkpoints import created_of
from ..core.outside import OUTSIDE, Outside
from ..core.processes.framing import Channel
from ..core.processes.serve import serve
from ..core.storage.locate import MEMORY, file_storage, storage_at
from ..core.storage.storage import Storage
from ..errors import CheckpointError, CheckpointFencedError, CheckpointNotFoundError
from ..publishing.publisher import Publisher
from .publishing import PublishPolicy

#: So often a snapshot may be replaced by a newer one before it is open; from then on it stays.
_MOST_LOOKS = 10


def main(outside: Outside = OUTSIDE) -> None:
    """Publish a version. If the run ends first, the version is given up, and its files are deleted."""
    serve(_publish, on_orphan="exit", outside=outside)


def _publish(job: dict[str, Any], run: Channel) -> dict[str, Any]:
    """Publish `source` by the `policy`; of snapshots in memory the newest, when this process is ready for it.

    The answer has the values of `Published`, the `source`, and when that was `committed`. Or it has `gone`: it was in
    memory, and nothing is there any more; or `fenced`: another run has taken over; or the `error`. `warnings` are for
    the log of the run.
    """
    warnings = _Warnings()
    try:
        policy = PublishPolicy.of(job["policy"])
        storage = storage_at(job["source"], process="publish", **policy.storage)
        answer = _published(policy, storage, job["source"])
    except CheckpointFencedError as error:
        answer = {"fenced": str(error)}
    except CheckpointError as error:
        answer = {"error": str(error)}
    return {**answer, "warnings": warnings.texts}


def _published(policy: PublishPolicy, storage: Storage, source: str) -> dict[str, Any]:
    """Make the version; returns the answer. Raises what `Publisher.publish` does."""
    # Another run may have taken over the checkpoints, and publish to another place.
    check_owner(storage_at(policy.root, process="publish", **policy.storage), policy.root, policy.run)
    target = storage_at(policy.to, process="publish", **policy.storage)
    files = file_storage(durable=policy.storage["durable"], process="publish")
    publisher = Publisher(target, policy.to, policy.mirror, policy.options, policy.run, files)
    if not source.startswith(MEMORY):
        return _version_of(publisher, storage, source, policy)
    root = os.path.dirname(source)
    for left in reversed(range(_MOST_LOOKS)):
        steps = scan_steps(storage, root, policy.names).committed
        if not steps:
            break
        newest = os.path.join(root, policy.names.folder(steps[-1]))
        try:
            return _version_of(publisher, storage, newest, policy)
        except CheckpointError:
            if not left or storage.is_folder(newest):
                raise
    return {"gone": True}


def _version_of(publisher: Publisher, storage: Storage, source: str, policy: PublishPolicy) -> dict[str, Any]:
    manifest = read_manifest(storage, source)
    if manifest is None:
        raise CheckpointNotFoundError(f"There is no committed checkpoint {source} any more.")
    committed, step = created_of(manifest) or storage.outside.date(), policy.names.step_of(os.path.basename(source))
    published = publisher.publish(storage, source, step or 0, committed)
    return {**vars(published), "source": source, "committed": committed}


class _Warnings(logging.Handler):
    """Collects the warnings of this process, which has no log of its own."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        root = logging.getLogger()
        root.addHandler(self)
        root.setLevel(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
