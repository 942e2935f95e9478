"""Background processes leave CPU and disk to training."""

from __future__ import annotations

import logging

from ..options import IoPriority

logger = logging.getLogger(__name__)


def lower_priority(pid: int, nice: int, io_priority: IoPriority) -> None:
    """Lower the priority of a writer process; one that cannot be lowered is logged and stays.

    Args:
        pid: of the process.
        nice: as for `nice`, 0 to 19; never below what the process has.
        io_priority: how it queues for the disk.
    """
    import psutil  # not before a process is started: the queues that use this are imported by the processes too

    try:
        process = psutil.Process(pid)
        process.nice(max(nice, process.nice()))
        if io_priority is IoPriority.low:
            process.ionice(psutil.IOPRIO_CLASS_BE, 7)
        elif io_priority is IoPriority.idle:
            process.ionice(psutil.IOPRIO_CLASS_IDLE)
    except (psutil.Error, OSError) as error:
        logger.warning("the checkpoint writer process keeps its normal priority (%s)", error)
