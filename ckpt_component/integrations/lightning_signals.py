"""Stop signals of a Lightning training: caught by the manager, in place of Lightning's own handlers.

Lightning's would leave with exit code 0 after a SIGTERM. Under Slurm, they would save a file of their own in the middle
of a step, and have the job queued again before that step is saved here.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from ..errors import CheckpointError
from ..managing.manager import CheckpointManager
from ..managing.stop_signals import STOPPING
from .lightning_package import fabric

logger = logging.getLogger(__name__)

_environments = fabric("plugins.environments")
_REQUEUE_SECONDS = 60.0


def catch_signals(trainer: Any, manager: CheckpointManager, requeue_exit_code: int) -> None:
    """Have the manager catch the signals that Lightning has handlers for. After `register_signal_handlers`."""
    trainer._signal_connector.teardown()
    environment = trainer._accelerator_connector.cluster_environment
    requeue_signal = getattr(environment, "requeue_signal", None)  # that of Slurm, which may be another than SIGUSR1
    numbers = {*STOPPING, *([requeue_signal] if requeue_signal is not None else [])}
    manager.stop_on_signal(*sorted(numbers), requeue_exit_code=requeue_exit_code)


def leave(trainer: Any, manager: CheckpointManager, requeue_exit_code: int) -> NoReturn:
    """Save the step that the loop has reached, and end the process, as `exit_if_stopped` says.

    A job for which Lightning's `auto_requeue` is on is queued again first, as Lightning does.

    Raises:
        SystemExit: always, unless the step could not be saved
        CheckpointError: that
    """
    manager.__exit__(None, None, None)
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, _environments.SLURMEnvironment) and environment.auto_requeue:
        number = environment.requeue_signal
        if number is not None and signal.getsignal(number) in (None, signal.SIG_DFL):  # submitit has one that requeues
            signal.signal(number, partial(_requeue, trainer.is_global_zero, requeue_exit_code))
    try:
        manager.exit_if_stopped()
    except SystemExit:
        # Of the processes that Lightning has started itself, a code other than 0 has it kill the others.
        if isinstance(environment, _environments.LightningEnvironment) and environment.local_rank() != 0:
            sys.exit(0)
        raise
    raise CheckpointError("The training was left, but no signal has stopped it.")


def _requeue(queues: bool, exit_code: int, number: int, frame: FrameType | None) -> None:
    """Have Slurm queue this job again; if it does not, leave with the exit code that asks for it."""
    if not queues:  # one rank does it for all
        return
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = os.environ.get("SLURM_JOB_ID", "") if array is None else f"{array}_{task}"
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=_REQUEUE_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        logger.error("job %s is not queued again: %s", job, error)
        sys.exit(exit_code)
    logger.info("job %s is queued again", job)
