"""Errors cross processes as text: an exception object may not be picklable, or mean nothing on the other side."""

from __future__ import annotations

import traceback
from typing import TypedDict

from ..errors import CheckpointSaveError


class Failure(TypedDict):
    """An exception in plain values."""

    error: str
    errno: int | None
    traceback: str


class RemoteTraceback(Exception):
    """The traceback of another process, as the cause of the error raised here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


def describe_failure(error: BaseException) -> Failure:
    """An exception as text, with the errno of the first OSError in its chain."""
    try:
        message = str(error)
    except Exception as broken:
        message = f"<its text cannot be shown: {type(broken).__name__}>"
    return {
        "error": f"{type(error).__name__}: {message}" if message else type(error).__name__,
        "errno": _errno_of(error),
        "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
    }


def as_local_error(failure: Failure, what: str) -> CheckpointSaveError:
    """The typed error to raise here for a failure over there; `what` is the first half of its sentence."""
    error = CheckpointSaveError(f"{what}: {failure['error']}", failure["errno"])
    error.__cause__ = RemoteTraceback(failure["traceback"])
    return error


def _errno_of(error: BaseException | None) -> int | None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None
