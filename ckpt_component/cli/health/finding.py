"""What one check has found."""

from __future__ import annotations

from dataclasses import dataclass

#: It works; it works in a slower or lesser way; saves fail.
OK, NOTE, FAILS = "ok", "note", "FAIL"


@dataclass(frozen=True)
class Finding:
    """One line of `ckpt doctor`.

    Attributes:
        what: what was checked
        status: OK, NOTE or FAILS
        text: what was found
        fix: what to do about it; empty if there is nothing to do
    """

    what: str
    status: str
    text: str
    fix: str = ""
