"""A process that publishes one version for a training run; it ends with the run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from ..core.commit.fencing import check_owner
from ..core.commit.manifest import read_manifest
from ..core.commit.scan import scan_steps
from ..core.outside import OUTSIDE, Outside
from ..core.processes.framing import Channel
from ..core.processes.serve import serve
from ..core.storage.files import FileStorage
from ..core.storage.locate import MEMORY, file_storage, storage_at
from ..core.storage.storage import Storage
from ..errors import CheckpointError, CheckpointFencedError, CheckpointNotFoundError
from ..formats.checkpoints import created_of
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
    with _Warnings() as warnings:
        try:
            answer = _published(PublishPolicy.of(job["policy"]), job["source"], run.outside.storage_of)
        except CheckpointFencedError as error:
            answer = {"fenced": str(error)}
        except CheckpointError as error:
            answer = {"error": str(error)}
        except OSError as error:
            answer = {"error": f"Could not publish {job['source']}: {error}"}
    return {**answer, "warnings": warnings.texts}


def _published(policy: PublishPolicy, source: str, simulated: Callable[[str], Storage] | None) -> dict[str, Any]:
    """Make the version; returns the answer. Raises what `Publisher.publish` does.

    Args:
        policy: what to publish
        source: a checkpoint
        simulated: see `Outside.storage_of`
    """
    storage_of: Callable[[str], Storage] = simulated or partial(storage_at, process="publish", **policy.storage)
    # Another run may have taken over the checkpoints, and publish to another place.
    check_owner(storage_of(policy.root), policy.root, policy.run)
    files = file_storage(durable=policy.storage["durable"], process="publish")
    if simulated is not None:
        files = cast(FileStorage, simulated(policy.mirror))
    publisher = Publisher(storage_of(policy.to), policy.to, policy.mirror, policy.options, policy.run, files)
    storage = storage_of(source)
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
    """Collects the warnings of this process, which has no log of its own, while it is entered."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger().setLevel(logging.WARNING)

    def __enter__(self) -> _Warnings:
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
