"""The one family of errors, and how an error crosses to another process or rank.

Every error that a caller may want to catch derives from `CheckpointError`, and from the builtin that a
reader would expect beside it. The torch-free writer process loads this module, so it imports the standard library
alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "CheckpointBusyError",
    "CheckpointConfigError",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointFencedError",
    "CheckpointGivenUpError",
    "CheckpointLoadError",
    "CheckpointNotFoundError",
    "CheckpointSaveError",
    "CheckpointStageError",
    "CheckpointStallError",
    "CheckpointStepError",
    "CheckpointStorageFullError",
    "CheckpointTimeoutError",
    "CheckpointTypeError",
    "CheckpointUnreadableError",
    "CheckpointWorldError",
    "MissingKeysError",
    "RanksError",
    "TornSnapshotError",
    "UnexpectedKeysError",
    "WorkerDiedError",
]


class CheckpointError(Exception):
    """Base of everything that this package raises on purpose."""


class CheckpointConfigError(CheckpointError, ValueError):
    """A config that cannot be built; the text has the key, its value, and what to type instead."""


class CheckpointStageError(CheckpointError, ValueError):
    """A value in the state dict cannot be checkpointed; the text names its key."""


class TornSnapshotError(CheckpointStageError):
    """A tensor changed while it was being copied, so the snapshot would mix two moments; names the keys."""


class CheckpointStepError(CheckpointError, TypeError, ValueError):
    """A step that is no step: negative, too large, or no whole number."""


class CheckpointSaveError(CheckpointError, RuntimeError):
    """A save failed after staging; nothing became visible. `errno` is that of the first OSError, or None."""

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class CheckpointFencedError(CheckpointSaveError):
    """Another run owns the folder of checkpoints now, so this one commits nothing there; names the owner."""


class CheckpointStorageFullError(CheckpointSaveError):
    """The disk is too full for the checkpoint; names what it needs and what is free. `errno` says which limit."""


class CheckpointGivenUpError(CheckpointSaveError):
    """So many saves in a row failed that going on without checkpoints is refused; names the last failure."""


class WorkerDiedError(CheckpointSaveError):
    """The writer process ended before it answered; the text has its signal or exit code."""


class RanksError(CheckpointSaveError):
    """Ranks failed, or cannot be reached; the same on all ranks.

    Attributes:
        failures: the text of each failed rank.
        causes: the name of the error's type on each failed rank; `RanksError` for a rank that is dead.
    """

    def __init__(
        self,
        message: str,
        errno: int | None = None,
        failures: dict[int, str] | None = None,
        causes: dict[int, str] | None = None,
    ) -> None:
        super().__init__(message, errno)
        self.failures = failures or {}
        self.causes = causes or {}


class CheckpointTimeoutError(CheckpointError, TimeoutError):
    """A wait ran into its deadline; the text names the wait and the key that sets the deadline."""


class CheckpointStallError(CheckpointTimeoutError):
    """A save would have kept training waiting for longer than `max_stall_s`, and was given up for it."""


class CheckpointBusyError(CheckpointError, RuntimeError):
    """A save came while the previous one was still running and `overlap` is `error`."""


class CheckpointTypeError(CheckpointError, TypeError):
    """An argument is of a kind that cannot be used; the text says what to pass instead."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """The path already holds something, and a path that holds a checkpoint is never written into."""


class CheckpointLoadError(CheckpointError, RuntimeError):
    """A checkpoint does not fit what was asked for: shape, dtype, or kind of a value."""


class CheckpointWorldError(CheckpointError, RuntimeError):
    """The ranks are not those for which the manager or checkpointer was built; the text says when to build it."""


def first_keys(keys: list[str], most: int = 20) -> str:
    """Keys for a text: a model has thousands."""
    return ", ".join(keys[:most]) + (f" and {len(keys) - most} more" if len(keys) > most else "")


class MissingKeysError(CheckpointLoadError):
    """`strict=True` and the checkpoint lacks keys that the target has; `keys` lists all of them."""

    def __init__(self, message: str, keys: list[str]) -> None:
        super().__init__(message)
        self.keys = keys


class UnexpectedKeysError(CheckpointLoadError):
    """`allow_unexpected=False` and the checkpoint has keys that the target lacks; `keys` lists all of them."""

    def __init__(self, message: str, keys: list[str]) -> None:
        super().__init__(message)
        self.keys = keys


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path, or no step that was asked for."""


class CheckpointCorruptError(CheckpointError, ValueError):
    """The bytes on disk are not the bytes that were written; names the file and the item."""


class CheckpointUnreadableError(CheckpointCorruptError):
    """The bytes cannot be read at all (EIO, EACCES, an unmounted folder): nothing is known about them.

    A resuming run goes on from an older checkpoint as with a corrupt one, and leaves this one where it is. `errno` is
    that of the system call, or None.
    """

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


#: An error's text travels as a message of the store, and a state's keys can make it long.
_LONGEST_TEXT = 20_000
#: How many ranks a message names one by one.
_NAMED_RANKS = 8


class RemoteTraceback(Exception):
    """The traceback of another process, as the cause of the error raised here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


def describe_error(error: BaseException) -> str:
    """An error as `Type: text`, also where its text cannot be made."""
    try:
        text = str(error)
    except Exception as broken:
        text = f"<its text cannot be shown: {type(broken).__name__}>"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def errno_of(error: BaseException | None) -> int | None:
    """The error's own errno, or that of the first OSError in its chain."""
    code = getattr(error, "errno", None)
    seen: set[int] = set()
    while code is None and error is not None and id(error) not in seen:
        seen.add(id(error))
        code = error.errno if isinstance(error, OSError) else None
        error = error.__cause__ or error.__context__
    return code if isinstance(code, int) else None


def error_as_plain(error: BaseException) -> dict[str, Any]:
    """An error as JSON values, for another rank; the family's own types come back as themselves."""
    plain: dict[str, Any] = {"kind": type(error).__name__, "text": _shortened(str(error)), "errno": errno_of(error)}
    if isinstance(error, RanksError):
        plain["failures"] = {str(rank): _shortened(text) for rank, text in error.failures.items()}
        plain["causes"] = {str(rank): cause for rank, cause in error.causes.items()}
    return plain


def error_from_plain(plain: Mapping[str, Any]) -> CheckpointError:
    """The inverse of `error_as_plain`; what is not of the family becomes a CheckpointSaveError."""
    kind, text, code = globals().get(plain["kind"]), plain["text"], plain["errno"]
    if kind is RanksError:
        failures = {int(rank): failure for rank, failure in plain["failures"].items()}
        return RanksError(text, code, failures, {int(rank): cause for rank, cause in plain["causes"].items()})
    if isinstance(kind, type) and issubclass(kind, CheckpointSaveError):
        return kind(text, code)
    if (
        isinstance(kind, type)
        and issubclass(kind, CheckpointError)
        and kind not in (MissingKeysError, UnexpectedKeysError)
    ):
        return kind(text)
    return CheckpointSaveError(f"On the leading rank: {plain['kind']}: {text}", code)


def ranks_failed(
    failures: Mapping[int, str], errno: int | None = None, causes: Mapping[int, str] | None = None
) -> RanksError:
    """The error that names every failed rank, with the texts of the first of them; for `causes` see `RanksError`."""
    ranks = sorted(failures)
    first = " | ".join(f"rank {rank}: {failures[rank]}" for rank in ranks[:_NAMED_RANKS])
    more = f" (and {len(ranks) - _NAMED_RANKS} more)" if len(ranks) > _NAMED_RANKS else ""
    return RanksError(f"{name_ranks(ranks)} failed. {first}{more}", errno, dict(failures), dict(causes or {}))


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks for a message: `Rank 3`, `Ranks 0, 3, 4`; the first few of many."""
    shown = ", ".join(map(str, ranks[:_NAMED_RANKS])) + (", ..." if len(ranks) > _NAMED_RANKS else "")
    return f"{'Rank' if len(ranks) == 1 else 'Ranks'} {shown}"


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[:_LONGEST_TEXT]} ... ({len(text) - _LONGEST_TEXT} more characters in the log of that rank)"
