"""Priority of background processes."""

from __future__ import annotations

import logging

from ..options import IoPriority

logger = logging.getLogger("ckpt_component.callers")


def lower_priority(pid: int, nice: int, io_priority: IoPriority) -> None:
    """Lower the priority of a writer process. If that fails, a warning is logged and the process keeps its priority.

    Args:
        pid: pid of the process
        nice: nice value, 0 to 19; not applied if the process has a higher one
        io_priority: I/O priority
    """
    import psutil  # late: the worker processes import this module too, and do not need psutil

    try:
        process = psutil.Process(pid)
        process.nice(max(nice, process.nice()))
        if io_priority is IoPriority.low:
            process.ionice(psutil.IOPRIO_CLASS_BE, 7)
        elif io_priority is IoPriority.idle:
            process.ionice(psutil.IOPRIO_CLASS_IDLE)
    except (psutil.Error, OSError) as error:
        logger.warning("the checkpoint writer process keeps its normal priority (%s)", error)
