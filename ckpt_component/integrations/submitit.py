"""submitit: a training function as a job that is queued again, and continues after the step at which it was stopped.

With `executor = submitit.AutoExecutor("logs")`, `executor.submit(ResumableJob(train), 1000)` calls `train(1000)` as
often as it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ..errors import CheckpointTypeError

try:
    from submitit.helpers import Checkpointable
except ImportError as error:
    raise ImportError("ckpt_component.integrations.submitit needs submitit: pip install 'submitit>=1.5'") from error

T = TypeVar("T")


class ResumableJob(Checkpointable, Generic[T]):
    """A training function as a submitit job that continues after a preemption, and after its time limit.

    The function calls `manager.stop_on_signal()` and `manager.restore(state)` before its loop, asks
    `manager.should_stop()` after every step, and calls `manager.exit_if_stopped()` after the `with` block. The signal
    of submitit (SIGUSR2, or the one that SUBMITIT_PREEMPT_SIGNAL names) then stops all ranks after the same step, and
    once that step is saved, submitit queues the same call again. A SIGTERM alone, as `scancel` sends it, saves the step
    too, and the job is not queued again.

    After its time limit, submitit queues a job again as often as its `max_num_timeout` says, by default 3 times.

    Args:
        train: the function; whatever submitit can pickle. Its arguments are those of `executor.submit`.

    Raises:
        CheckpointTypeError: `train` is not callable, but perhaps the result of a call
    """

    def __init__(self, train: Callable[..., T]) -> None:
        if not callable(train):
            raise CheckpointTypeError(
                f"ResumableJob takes the training function itself, got {train!r}; pass arguments to executor.submit()."
            )
        self._train = train

    def __call__(self, *args: Any, **kwargs: Any) -> T:
        """Train; submitit calls this on every rank, with the arguments of `submit`."""
        return self._train(*args, **kwargs)
