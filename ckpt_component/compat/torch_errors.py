"""Errors of the reference classes are torch's `CheckpointException` too, which callers written for those expect.

An error keeps its type, its message and its cause; it only gets torch's class as a further base, and `failures` as that
class has them, with exceptions where `RanksError` has messages. Imports no torch: where the class was not imported,
no code can catch it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Iterator

from ..errors import CheckpointError, CheckpointSaveError, RanksError
from .peers import this_rank


@contextlib.contextmanager
def as_checkpoint_exception() -> Iterator[None]:
    """What this package raises inside is caught as torch's CheckpointException too, with its `failures` by rank."""
    try:
        yield
    except CheckpointError as error:
        torchs = getattr(sys.modules.get("torch.distributed.checkpoint.api"), "CheckpointException", None)
        if torchs is not None and not isinstance(error, torchs):
            error.__class__ = _both(type(error), torchs)  # type: ignore[arg-type]  # a class has a hash
        raise


@functools.cache
def _both(own: type[CheckpointError], torchs: type[BaseException]) -> type[CheckpointError]:
    """A class of both families, which is shown and pickled as the first."""
    names = {
        "__doc__": own.__doc__,
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__str__": own.__str__,
        "__reduce__": lambda error: (own, *own.__reduce__(error)[1:]),
        "failures": property(_failures),
    }
    return type(own.__name__, (own, torchs), names)


def _failures(error: CheckpointError) -> dict[int, tuple[BaseException, traceback.StackSummary]]:
    """As torch has them: the exception of each failed rank and its traceback; none for another rank."""
    no_frames = traceback.StackSummary()
    if isinstance(error, RanksError) and vars(error)["failures"]:
        texts = vars(error)["failures"]
        return {rank: (CheckpointSaveError(text, error.errno), no_frames) for rank, text in texts.items()}
    return {this_rank(): (error, traceback.extract_tb(error.__traceback__))}
