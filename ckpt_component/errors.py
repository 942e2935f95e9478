"""The one family of errors.

Every error that a caller may want to catch derives from `CheckpointError`, and from the builtin that a
reader would expect beside it. This module imports nothing, because the torch-free writer process loads it.
"""

from __future__ import annotations

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
    """There is no room for the checkpoint: what it needs, what is free, what helps. `errno` says which limit it met."""


class CheckpointGivenUpError(CheckpointSaveError):
    """So many saves in a row failed that going on without checkpoints is refused; names the last failure."""


class WorkerDiedError(CheckpointSaveError):
    """The writer process ended before it answered; the text has its signal or exit code."""


class RanksError(CheckpointSaveError):
    """Ranks failed, or cannot be reached; the same on all ranks.

    Attributes:
        failures: the text of each failed rank.
        causes: the name of the error's type on each failed rank; `RanksError` for a rank that is gone.
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
    """The bytes cannot be read at all (EIO, EACCES, a mount that is gone): nothing is known about them.

    A resuming run goes on from an older checkpoint as with a corrupt one, and leaves this one where it is. `errno` is
    that of the system call, or None.
    """

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno
