"""Make errors of the reference classes instances of torch's `CheckpointException`, which their callers expect.

An error keeps its type, message and cause. It gets torch's class as an additional base, and `failures` as in that
class: exceptions instead of messages as in `RanksError`. Imports no torch: code that has not imported the class cannot
catch it.
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
    """Let errors of this package raised inside also be caught as torch's CheckpointException, with `failures`."""
    try:
        yield
    except CheckpointError as error:
        torchs = getattr(sys.modules.get("torch.distributed.checkpoint.api"), "CheckpointException", None)
        if torchs is not None and not isinstance(error, torchs):
            error.__class__ = _both(type(error), torchs)  # type: ignore[arg-type]  # a class has a hash
        raise


@functools.cache
def _both(own: type[CheckpointError], torchs: type[BaseException]) -> type[CheckpointError]:
    """A class with both bases that is shown and pickled as the first."""
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
    """As in torch: exception and traceback of each failed rank."""
    no_frames = traceback.StackSummary()
    if isinstance(error, RanksError) and vars(error)["failures"]:
        texts = vars(error)["failures"]
        return {rank: (CheckpointSaveError(text, error.errno), no_frames) for rank, text in texts.items()}
    return {this_rank(): (error, traceback.extract_tb(error.__traceback__))}
