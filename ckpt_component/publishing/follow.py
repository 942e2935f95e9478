"""`follow`: the published weights in an inference process, version by version."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator, Mapping
from contextlib import ExitStack
from typing import Any

from ..core.storage.locate import file_storage, path_text
from ..errors import CheckpointConfigError
from .receiver import Receiver
from .weights_in_folder import Weights


def follow(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    poll_seconds: float = 1.0,
    timeout: float | None = None,
) -> Generator[Weights, None, None]:
    """Follow published weights: yields the newest version, and each newest one after it.

    A folder on this host is brought to the version before it is yielded. Versions that came meanwhile are skipped: of
    them only the changes are read. Each version is verified. Errors of the source, such as a bucket that does not
    answer, are logged once, and the source is tried again after longer and longer pauses.

    Closing the iterator, or its end, releases the folder. Let go of the arrays and tensors of a version before the next
    one is asked for: while they are there, the folder is copied for each version, instead of changed where it differs.

        for weights in follow("s3://bucket/run/weights"):
            model.load_weights(weights.tensors())

    Args:
        source: folder or URL of the versions (`checkpoint.publish.to` of the training run)
        folder: folder on this host for the weights, which stays; it has room for them twice. None: a private one in the
            folder for temporary files (TMPDIR), deleted at the end.
        options: options of the bucket, for a URL, as in `checkpoint.storage.options`
        poll_seconds: seconds between two looks at the source
        timeout: seconds to wait for a version; None: as long as it takes

    Returns:
        A generator of `Weights`.

    Raises:
        CheckpointConfigError: an argument is invalid, or a package is missing
        CheckpointExistsError: the folder has something else, or versions of another source
        CheckpointInUseError: another process brings the folder to versions
        CheckpointTimeoutError: no version came in time
        CheckpointSaveError: the folder cannot be written
    """
    if not poll_seconds > 0:
        raise CheckpointConfigError(f"poll_seconds={poll_seconds!r}: give seconds above 0.")
    return _weights(path_text(source), None if folder is None else path_text(folder), options, poll_seconds, timeout)


def _weights(
    source: str, folder: str | None, options: Mapping[str, Any] | None, poll_seconds: float, timeout: float | None
) -> Generator[Weights, None, None]:
    with ExitStack() as until_closed:
        if folder is None:
            private = tempfile.mkdtemp(prefix="ckpt-weights-")
            until_closed.callback(file_storage().remove_tree, private)
            folder = os.path.join(private, "weights")
        receiver = until_closed.enter_context(Receiver(source, folder, options=options))
        is_first = True
        for pulled in receiver.follow(poll_seconds, timeout):
            changed = None if is_first else pulled.changed
            is_first = False
            yield Weights(pulled.version, pulled.step, pulled.path, changed, pulled.nbytes, pulled.lag)
