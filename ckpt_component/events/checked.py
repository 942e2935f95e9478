"""The events of a folder whose fields are as they are written: a file may be damaged, or made by anybody."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..core.storage.storage import Storage
from .event_file import read_values

logger = logging.getLogger(__name__)

#: The year 9999, the last that a calendar shows.
_LATEST = 253_370_000_000
#: Kind of event -> what it has besides `time`, `run` and `rank`.
_REQUIRED = {
    "run": ("world_size",),
    "steps": ("first", "ends"),
    "save": ("path", "spans"),
    "load": ("path", "spans"),
    "peers": ("path", "sent", "at_peers_s"),
    "wait": ("for", "since", "until", "ended"),
}
_NULL = frozenset(("step", "error", "preset", "host", "pid", "until", "ended"))


def checked_events(root: str | os.PathLike[str], fs: Storage | None = None) -> Iterator[dict[str, Any]]:
    """The events of a folder, as `read_events`, but none with a missing field or an absurd value.

    At the end, one warning says how many were skipped.

    Args:
        root: the folder of the checkpoints
        fs: its storage; None: that of the path, without options

    Raises:
        OSError: an event file cannot be read
    """
    skipped = 0
    for event in read_values(root, fs):
        if _is_event(event):
            yield event
        else:
            skipped += 1
    if skipped:
        what = "an event that is" if skipped == 1 else f"{skipped} events that are"
        logger.warning("%s: %s not of the form that this release writes, skipped", os.fspath(root), what)


def _is_event(event: Any) -> bool:
    if not isinstance(event, dict):
        return False
    kind = event.get("event")
    required = ["time", "run", "rank", *_REQUIRED.get(kind, ())] if isinstance(kind, str) else ["event"]
    if kind == "upload" and event.get("error") is None:
        required += ["bytes", "seconds", "lag_steps"]
    if kind == "publish" and event.get("error") is None:
        required += ["step", "version", "bytes", "whole_bytes", "seconds", "lag"]
    return event.keys() >= {*required} and all(
        name not in _FIELDS or (value is None and name in _NULL) or _FIELDS[name](value)
        for name, value in event.items()
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e18  # neither NaN nor infinite


def is_time(value: Any) -> bool:
    """Whether a value is a point in time, in seconds since 1970, that a calendar shows."""
    return _is_number(value) and 0 <= value < _LATEST


def _are_times(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_time, value))


def _are_spans(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(span, list) and len(span) == 2 and all(map(_is_number, span)) for span in value.values()
    )


#: Field -> whether a value is one that it may have; others are not looked at.
_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("time", "since", "until", "ended"), is_time),
    "ends": _are_times,
    **dict.fromkeys(("memory", "whole"), _is_flag),
    "spans": _are_spans,
    **dict.fromkeys(("event", "run", "path", "target", "outcome", "error"), _is_text),
    **dict.fromkeys(("preset", "host", "source", "for"), _is_text),
    **dict.fromkeys(("rank", "world_size", "pid", "step", "first", "files", "items", "attempts"), _is_count),
    **dict.fromkeys(("lag_steps", "version", "skipped"), _is_count),
    **dict.fromkeys(("bytes", "reused", "host_memory_bytes", "stall_s", "lost_s", "gbps", "seconds"), _is_number),
    **dict.fromkeys(("sent", "at_peers_s", "whole_bytes", "lag"), _is_number),
}
