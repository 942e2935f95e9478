"""Priority of background processes."""

from __future__ import annotations

import logging
import os

from ..options import IoPriority
from ..outside import OUTSIDE, Outside

logger = logging.getLogger("ckpt_component.callers")

#: Users other than root may set one group in a tenth of a second, on the whole host.
_TRY_SECONDS, _PAUSE_SECONDS = 2.0, 0.02


def lower_priority(pid: int, nice: int, io_priority: IoPriority, outside: Outside = OUTSIDE) -> None:
    """Lower the priority of a writer process. If that fails, a warning is logged and the process keeps its priority.

    Args:
        pid: pid of the process
        nice: nice value, 0 to 19; not applied if the process has a higher one
        io_priority: I/O priority
        outside: of this process
    """
    import psutil  # late: the worker processes import this module too, and do not need psutil

    try:
        process = psutil.Process(pid)
        nice = max(nice, process.nice())
        process.nice(nice)
        if io_priority is IoPriority.low:
            process.ionice(psutil.IOPRIO_CLASS_BE, 7)
        elif io_priority is IoPriority.idle:
            process.ionice(psutil.IOPRIO_CLASS_IDLE)
    except (psutil.Error, OSError) as error:
        logger.warning("the checkpoint writer process keeps its normal priority (%s)", error)
        return
    _lower_group(pid, nice, outside)


def _lower_group(pid: int, nice: int, outside: Outside) -> None:
    """Where the kernel groups tasks by session, give the group of a session's leader the same priority.

    There `nice` counts only among the tasks of one session, and a process in a session of its own gets as much of a
    busy core as all of the training; see "The autogroup feature" in sched(7).
    """
    group, deadline = f"/proc/{pid}/autogroup", outside.now() + _TRY_SECONDS
    try:
        while os.getsid(pid) == pid and os.path.exists(group):
            with open(group, "r+b", buffering=0) as setting:
                if setting.write(b"%d" % nice) is not None:
                    return
            if outside.now() > deadline:
                raise TimeoutError(f"other groups were set for {_TRY_SECONDS:g} s")
            outside.sleep(_PAUSE_SECONDS)
    except OSError as error:  # read-only in some containers
        logger.info("%s keeps its normal priority, which counts where no cgroup divides the cores (%s)", group, error)
