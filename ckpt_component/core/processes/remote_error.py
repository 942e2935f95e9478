"""Pass errors between processes as text: an exception may not be picklable, or its type unknown to the receiver.

A frame of the kind `failed` has what `error_as_plain` returns, and what only processes of one host need.
"""

from __future__ import annotations

import errno
import traceback
from collections.abc import Mapping
from typing import Any

from ...errors import CheckpointSaveError, RemoteTraceback, error_as_plain


def failed_frame(error: BaseException, *, traced: bool = True, **answered: Any) -> dict[str, Any]:
    """The frame that tells another process of an exception.

    Args:
        error: the exception
        traced: with its traceback, which takes a while; only then `as_local_error` is its inverse
        **answered: further fields, which say what has failed
    """
    frame = {"kind": "failed", **answered, **error_as_plain(error)}
    frame.update(reason=getattr(error, "strerror", None), path=getattr(error, "filename", None))
    if traced:
        frame["traceback"] = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return frame


def as_local_error(plain: Mapping[str, Any], what: str) -> CheckpointSaveError:
    """Return the error to raise here for a failure in another process; `what` is the first half of its text."""
    error = CheckpointSaveError(f"{what}: {plain['error']}", plain["errno"])
    error.__cause__ = RemoteTraceback(plain["traceback"])
    return error


def as_os_error(plain: Mapping[str, Any]) -> OSError:
    """Return the OSError that another process had, or one of EIO for what was none."""
    # Another release may not tell the reason apart.
    code, text = plain["errno"], plain.get("reason") or plain["error"]
    return OSError(code, text, plain["path"]) if code else OSError(errno.EIO, text)
