"""One life of a job under torchrun's agent, which keeps its snapshots in memory until it is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from faults.invariants import blank_state, differences, state_of
from faults.workloads import prepare

from ckpt_component import CheckpointError, CheckpointListener, LoadReport, SaveReport, build_manager
from ckpt_component.callers.write_callers import MemoryCaller

__all__ = ["prepare"]  # of the fork server, before the fork

#: A snapshot in memory each step, and a checkpoint now and then.
EVERY_STEPS, DURABLE = 1, 7
LEASE = 30
MOST_STEPS = 2000
OVERRIDES = (
    "checkpoint/recovery=host",
    f"checkpoint.recovery.every_steps={EVERY_STEPS}",
    f"checkpoint.save.every_steps={DURABLE}",
    "checkpoint.save.at_end=false",
    "checkpoint.events=false",
    "checkpoint.timeouts.stage=10",
    "checkpoint.timeouts.write=20",
    "checkpoint.timeouts.close=15",  # longer than any restart may wait
    "checkpoint.timeouts.heartbeat=2",
    "checkpoint.timeouts.stall=15",
    "checkpoint.timeouts.visible=5",
)


def launch(
    root: str, log: str, ranks: int, steps: int = MOST_STEPS, lease: int = LEASE, dies: tuple[int, int] | None = None
) -> None:
    """As torchrun does: start so many ranks, and end all if one has died; arguments as of `live`."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.setsid()  # a session that can be killed as one
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=os.path.basename(log),
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.05,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=os.path.dirname(log)),  # else in /tmp, and left there when it is killed
    )
    elastic_launch(config, live)(root, log, steps, lease, dies)


def live(root: str, log: str, steps: int, lease: int, dies: tuple[int, int] | None) -> None:
    """On a rank: come back, say from where, and train until killed.

    Args:
        root: the folder
        log: where each rank says what it does
        steps: how many to train
        lease: of the servers
        dies: a rank, and which of its snapshots it dies with, counted from 1, before its server has it; None: none does
    """
    import torch.distributed as dist

    dist.init_process_group("gloo")
    told = Told(log, dist.get_rank())
    told.say(began=True)
    if dies is not None and dies[0] == dist.get_rank():
        die_before_giving(dies[1])
    try:
        with build_manager("async_persistent", (*OVERRIDES, f"checkpoint.recovery.lease={lease}"), dir=root) as manager:
            manager.add_listener(told)
            state = blank_state()
            told.say(asked=time.time())
            step = manager.restore(state) or 0
            told.say(resumed=step, back=time.time(), wrong=differences(state, state_of(step)))
            for number in range(step + 1, step + 1 + steps):
                told.say(reached=number)
                manager.maybe_save(number, state_of(number))
                time.sleep(0.002)
    except CheckpointError as error:
        told.say(failed=f"{type(error).__name__}: {error}")
        raise
    finally:
        dist.destroy_process_group()


def die_before_giving(number: int) -> None:
    """Let this process die with the n-th snapshot that it would have its server keep."""
    gives, left = MemoryCaller.run, iter(range(number - 1, -1, -1))

    def run(*arguments: Any) -> Any:
        if not next(left, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        return gives(*arguments)

    setattr(MemoryCaller, "run", run)  # noqa: B010  mypy refuses the assignment


class Told(CheckpointListener):
    """What a rank has said so far, in a file that outlives it."""

    def __init__(self, log: str, rank: int) -> None:
        self._file = os.open(f"{log}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(self, **values: Any) -> None:
        os.write(self._file, json.dumps({"pid": os.getpid(), **values}).encode() + b"\n")

    def on_restored(self, report: LoadReport) -> None:
        self.say(source=report.source, loads=report.time)

    def on_committed(self, report: SaveReport) -> None:
        self.say(**{"kept" if report.memory else "saved": report.step})


def told_by(log: str, ranks: int) -> list[list[dict[str, Any]]]:
    """What each rank has said; without a line that it was killed in."""
    said = []
    for rank in range(ranks):
        path = Path(f"{log}.{rank}")
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        said.append([json.loads(line) for line in lines])
    return said
