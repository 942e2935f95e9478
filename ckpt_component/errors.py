"""The exceptions of this package, and how they are sent to other processes and ranks.

Every error that a caller may want to catch derives from `CheckpointError` and, in addition, from the closest builtin
exception. The torch-free writer process imports this module, so it imports only the standard library.
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
    "CheckpointInUseError",
    "CheckpointLoadError",
    "CheckpointNotFoundError",
    "CheckpointPartError",
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
    "ReplicasDifferError",
    "TornSnapshotError",
    "UnexpectedKeysError",
    "WorkerDiedError",
]


def printable(text: str) -> str:
    r"""A text in which what a terminal would not show, or would act on, is as in its `repr`: `\x1b` for an escape."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


class CheckpointError(Exception):
    """Base class of all errors that this package raises on purpose."""

    def __str__(self) -> str:
        # A text may quote a key or a name from a file that anybody may have written. Not super(): torch's exception,
        # with which `compat` combines these, has its own text.
        return printable(BaseException.__str__(self))


class CheckpointConfigError(CheckpointError, ValueError):
    """A config value is invalid; the message has the key, its value, and what to type instead."""


class CheckpointStageError(CheckpointError, ValueError):
    """A value in the state dict cannot be checkpointed; the message names its key."""


class TornSnapshotError(CheckpointStageError):
    """Tensors changed while they were being copied, so the snapshot would be inconsistent; names their keys."""


class CheckpointStepError(CheckpointError, TypeError, ValueError):
    """A step is invalid: negative, too large, not an integer, or before the newest one of its run."""


class CheckpointSaveError(CheckpointError, RuntimeError):
    """A save failed after staging; no checkpoint became visible. `errno` is that of the first OSError, or None."""

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class CheckpointFencedError(CheckpointSaveError):
    """Another run has taken over the checkpoint folder, so this one can no longer commit there; names the owner."""


class CheckpointStorageFullError(CheckpointSaveError):
    """The disk is too full for the checkpoint; has the needed and the free bytes. `errno` says which limit was hit."""


class CheckpointGivenUpError(CheckpointSaveError):
    """Too many saves in a row failed to continue training without checkpoints; names the last failure."""


class WorkerDiedError(CheckpointSaveError):
    """The writer process died before it responded; the message has its signal or exit code."""


class ReplicasDifferError(CheckpointSaveError):
    """Replicas of a value differ between ranks, and `on_different_replicas` is `error`; names keys and ranks."""


class RanksError(CheckpointSaveError):
    """Ranks failed or are unreachable; the same error on all ranks.

    Attributes:
        failures: the message of each failed rank
        causes: the type name of the error on each failed rank; `RanksError` for a dead rank
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
    """A wait timed out; the message names the wait and the key of its timeout."""


class CheckpointStallError(CheckpointTimeoutError):
    """A save was given up because it would have blocked training for longer than `max_stall_s`."""


class CheckpointBusyError(CheckpointError, RuntimeError):
    """A save was requested while the previous one was still running, and `overlap` is `error`."""


class CheckpointTypeError(CheckpointError, TypeError):
    """An argument has the wrong type; the message says what to pass instead."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """The path already exists, and existing checkpoints are never overwritten."""


class CheckpointInUseError(CheckpointError, RuntimeError):
    """Another run that is still running saves in the checkpoint folder, and `takeover` is false; names that run."""


class CheckpointLoadError(CheckpointError, RuntimeError):
    """A checkpoint does not match the load target, such as in shape, dtype or kind of a value."""


class CheckpointWorldError(CheckpointError, RuntimeError):
    """The ranks are not those for which the manager or checkpointer was built; the message says when to build it."""


def first_keys(keys: list[str], most: int = 20) -> str:
    """Format the first of many keys for a message."""
    return ", ".join(map(printable, keys[:most])) + (f" and {len(keys) - most} more" if len(keys) > most else "")


def missing_keys(keys: list[str], most: int = 20) -> str:
    """The clause that a checkpoint is missing keys of the target, in the words of torch's checkpointer."""
    return f"is missing keys: {keys[:most]}" + (f" and {len(keys) - most} more" if len(keys) > most else "")


class MissingKeysError(CheckpointLoadError):
    """`strict=True` and the checkpoint lacks keys that the target has; `keys` lists all of them.

    `advice` is the sentence of the message on other names that the checkpoint has for them; empty if it has none.
    """

    def __init__(self, message: str, keys: list[str], advice: str = "") -> None:
        super().__init__(message)
        self.keys = keys
        self.advice = advice


class UnexpectedKeysError(CheckpointLoadError):
    """`allow_unexpected=False` and the checkpoint has keys that the target lacks; `keys` lists all of them."""

    def __init__(self, message: str, keys: list[str]) -> None:
        super().__init__(message)
        self.keys = keys


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path, or not of the requested step."""


class CheckpointCorruptError(CheckpointError, ValueError):
    """The bytes on disk are not the bytes that were written; the message names the file and the item."""


class CheckpointUnreadableError(CheckpointCorruptError):
    """A checkpoint cannot be read (EIO, EACCES, an unmounted folder), so it is unknown whether it is corrupt.

    A run that resumes falls back to an older checkpoint, as with a corrupt one, and leaves this one in place. `errno`
    is that of the system call, or None.
    """

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class CheckpointPartError(CheckpointUnreadableError):
    """What is here of a checkpoint is a part: each of several hosts has its own files, and those of some are missing.

    It is whole again where all these hosts are together.
    """


#: Maximum length of an error message that is sent through the store. The keys of a state can make it long.
_LONGEST_TEXT = 20_000
#: Maximum number of ranks that a message lists.
_NAMED_RANKS = 8


class RemoteTraceback(Exception):
    """The traceback of another process, used as the cause of the error raised here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


def describe_error(error: BaseException) -> str:
    """Format an error as `Type: message`, even if its `__str__` raises."""
    try:
        text = str(error)
    except Exception as str_error:
        text = f"<its text cannot be shown: {type(str_error).__name__}>"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def errno_of(error: BaseException | None) -> int | None:
    """The errno of an error, or of the first OSError in its chain."""
    code = getattr(error, "errno", None)
    seen: set[int] = set()
    while code is None and error is not None and id(error) not in seen:
        seen.add(id(error))
        code = error.errno if isinstance(error, OSError) else None
        error = error.__cause__ or error.__context__
    return code if isinstance(code, int) else None


def error_as_plain(error: BaseException) -> dict[str, Any]:
    """Convert an error to JSON values, to tell it to another rank or process; see `error_from_plain`."""
    plain: dict[str, Any] = {"error": _shortened(describe_error(error)), "errno": errno_of(error)}
    if isinstance(error, RanksError):
        plain["failures"] = {str(rank): _shortened(text) for rank, text in error.failures.items()}
        plain["causes"] = {str(rank): cause for rank, cause in error.causes.items()}
    return plain


def kind_and_text(plain: Mapping[str, Any]) -> tuple[str, str]:
    """The name of the type of an error, and its text, from what `error_as_plain` returned."""
    kind, _, text = plain["error"].partition(": ")
    return kind, text


def error_from_plain(plain: Mapping[str, Any]) -> CheckpointError:
    """The inverse of `error_as_plain`; an error that is not of this package becomes a CheckpointSaveError."""
    name, text = kind_and_text(plain)
    kind, code = globals().get(name), plain["errno"]
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
    return CheckpointSaveError(f"On the leading rank: {name}: {text}", code)


def ranks_failed(
    failures: Mapping[int, str], errno: int | None = None, causes: Mapping[int, str] | None = None
) -> RanksError:
    """Make the error that names the failed ranks and quotes the first messages; for `causes` see `RanksError`."""
    ranks = sorted(failures)
    first = " | ".join(f"rank {rank}: {failures[rank]}" for rank in ranks[:_NAMED_RANKS])
    more = f" (and {len(ranks) - _NAMED_RANKS} more)" if len(ranks) > _NAMED_RANKS else ""
    return RanksError(f"{name_ranks(ranks)} failed. {first}{more}", errno, dict(failures), dict(causes or {}))


def name_ranks(ranks: Sequence[int]) -> str:
    """Format ranks for a message: `Rank 3`, `Ranks 0, 3, 4`; only the first few of many."""
    shown = ", ".join(map(str, ranks[:_NAMED_RANKS])) + (", ..." if len(ranks) > _NAMED_RANKS else "")
    return f"{'Rank' if len(ranks) == 1 else 'Ranks'} {shown}"


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[:_LONGEST_TEXT]} ... ({len(text) - _LONGEST_TEXT} more characters in the log of that rank)"
