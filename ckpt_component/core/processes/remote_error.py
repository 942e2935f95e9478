"""Pass errors between processes as text: an exception may not be picklable, or its type unknown to the receiver."""

from __future__ import annotations

import traceback
from typing import TypedDict

from ...errors import CheckpointSaveError, RemoteTraceback, describe_error, errno_of


class Failure(TypedDict):
    """An exception as plain values."""

    error: str
    errno: int | None
    traceback: str


def describe_failure(error: BaseException) -> Failure:
    """Describe an exception as text, with the errno of the first OSError in its chain."""
    return {
        "error": describe_error(error),
        "errno": errno_of(error),
        "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
    }


def as_local_error(failure: Failure, what: str) -> CheckpointSaveError:
    """Return the error to raise here for a failure in another process; `what` is the first half of its text."""
    error = CheckpointSaveError(f"{what}: {failure['error']}", failure["errno"])
    error.__cause__ = RemoteTraceback(failure["traceback"])
    return error
