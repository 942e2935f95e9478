"""What the ranks found out together about one call."""

from __future__ import annotations

import errno
import json
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError, CheckpointSaveError, RanksError
from ..writing.remote_error import describe_failure

#: How many ranks an error names one by one.
_NAMED = 8


@dataclass(frozen=True)
class Verdict:
    """What rank 0 decided: which ranks failed, if any, and in which look at the question that is told first."""

    failures: dict[int, str]
    errno: int | None = None
    at: int = 0

    def to_raise(self, what: str, world_size: int, cause: BaseException | None) -> RanksError | None:
        """The error that is the same on all ranks, with this rank's own as its cause; None where all went well."""
        if not self.failures:
            return None
        failed = sorted(self.failures)
        names = ", ".join(map(str, failed[:_NAMED])) + (", ..." if len(failed) > _NAMED else "")
        texts = " | ".join(f"rank {number}: {self.failures[number]}" for number in failed[:_NAMED])
        code = "" if self.errno is None else f" ({errno.errorcode.get(self.errno, f'errno {self.errno}')})"
        plural = "s" if len(failed) > 1 else ""
        text = f"{what} failed on rank{plural} {names} of {world_size}{code}. {texts}"
        error = RanksError(text, self.errno, dict(self.failures))
        error.__cause__ = cause
        return error

    def encoded(self) -> bytes:
        """As the other ranks read it."""
        failures = {str(number): text for number, text in self.failures.items()}
        return json.dumps({"failures": failures, "errno": self.errno, "at": self.at}).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Verdict:
        """What `encoded` made of it."""
        plain = json.loads(data)
        failures = {int(number): text for number, text in plain["failures"].items()}
        return cls(failures, plain["errno"], plain["at"])


def outcome_as_plain(error: BaseException | None) -> dict[str, Any] | None:
    """How a call went on one rank, for JSON: None where it went well, else the text, and the errno if there is one."""
    if error is None:
        return None
    plain = describe_failure(error)
    text = str(error) if isinstance(error, CheckpointError) else plain["error"]
    code = error.errno if isinstance(error, CheckpointSaveError) else plain["errno"]
    return {"text": text, "errno": code}
