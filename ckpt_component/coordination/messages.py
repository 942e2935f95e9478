"""What ranks tell each other: plain JSON, and errors as name and text."""

from __future__ import annotations

import json
import zlib
from typing import Any

from .. import errors
from ..errors import CheckpointError, CheckpointSaveError, RanksError

#: An error's text travels as a message of the store, and a state's keys can make it long.
_MOST_TEXT = 20_000


def as_plain(error: Exception) -> dict[str, Any]:
    """An error as JSON; the family's own types come back as themselves."""
    plain: dict[str, Any] = {
        "kind": type(error).__name__,
        "text": _short(str(error)),
        "errno": getattr(error, "errno", None),
    }
    if isinstance(error, RanksError):
        plain["failures"] = {str(rank): _short(text) for rank, text in error.failures.items()}
        plain["causes"] = {str(rank): cause for rank, cause in error.causes.items()}
    return plain


def _short(text: str) -> str:
    if len(text) <= _MOST_TEXT:
        return text
    return f"{text[:_MOST_TEXT]} ... ({len(text) - _MOST_TEXT} more characters in the log of that rank)"


def as_error(plain: dict[str, Any]) -> CheckpointError:
    """The inverse of `as_plain`; what is not of the family becomes a CheckpointSaveError."""
    kind = getattr(errors, plain["kind"], None)
    if kind is RanksError:
        failures = {int(rank): text for rank, text in plain["failures"].items()}
        return RanksError(plain["text"], plain["errno"], failures, {int(r): c for r, c in plain["causes"].items()})
    if isinstance(kind, type) and issubclass(kind, CheckpointSaveError):
        return kind(plain["text"], plain["errno"])
    if isinstance(kind, type) and issubclass(kind, CheckpointError) and kind is not errors.MissingKeysError:
        return kind(plain["text"])
    return CheckpointSaveError(f"On the leading rank: {plain['kind']}: {plain['text']}", plain["errno"])


def pack(value: Any) -> bytes:
    """A plain value as bytes for the store."""
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)


def unpack(data: bytes) -> Any:
    """The inverse of `pack`."""
    return json.loads(zlib.decompress(data))
