"""The processes of a job: its trainers, who started them, and what they started themselves."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

import ckpt_component

from .marks import now, read_marks

#: How long a job may take to come as far as it must, in seconds.
_SECONDS = 300.0
_LOOK_SECONDS = 0.005
_GRACE_SECONDS = 5.0
_TRAINER = "ckpt_bench.recovery.trainer"
#: The folders that this package and `ckpt_component` are imported from.
_ROOTS = os.pathsep.join(
    str(folder)
    for folder in (Path(__file__).resolve().parents[2], Path(str(ckpt_component.__file__)).resolve().parents[1])
)

AllMarks = Mapping[int, Mapping[str, tuple[float, Any]]]


class JobProcess:
    """A job that was just started: one trainer, or torchrun and several.

    Args:
        task: what the trainers do, see `trainer.main`, without `marks`
        ranks: number of trainers
        marks: a new folder for their marks
        environment: what is changed in the environment of the trainers
    """

    def __init__(self, task: Mapping[str, Any], ranks: int, marks: str, environment: Mapping[str, str]) -> None:
        os.mkdir(marks)
        self._marks, self._ranks = marks, ranks
        starter = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        command = [sys.executable, *starter, "-m", _TRAINER, json.dumps({**task, "marks": marks})]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": _ROOTS, **environment}
        )
        self._started: set[psutil.Process] = set()

    def wait(self, until: Callable[[Mapping[str, tuple[float, Any]]], bool]) -> AllMarks:
        """Wait until something holds for the marks of every rank, and return them.

        Raises:
            RuntimeError: the job ended before, or did not come so far in time
        """
        deadline = time.monotonic() + _SECONDS
        while True:
            ended = self._process.poll()
            marks = read_marks(self._marks)
            if len(marks) == self._ranks and all(map(until, marks.values())):
                return marks
            if ended is not None or time.monotonic() > deadline:
                how = f"was not so far after {_SECONDS:g} s" if ended is None else f"ended with code {ended}"
                come = {rank: [*of_rank][-1:] for rank, of_rank in sorted(marks.items())}
                raise RuntimeError(f"the job {how}; the last marks of its ranks: {come}")
            time.sleep(_LOOK_SECONDS)

    def kill(self) -> float:
        """Kill all trainers and who started them, and wait until they are gone; what they have started goes on.

        Returns:
            When they were killed.

        Raises:
            RuntimeError: one of them is still there after some seconds
        """
        trainers = [int(of_rank["began"][1]) for of_rank in read_marks(self._marks).values()]
        self._look()
        with ExitStack() as open_descriptors, select.epoll() as gone:
            for pid in trainers:
                descriptor = os.pidfd_open(pid)
                open_descriptors.callback(os.close, descriptor)
                gone.register(descriptor, select.EPOLLIN | select.EPOLLONESHOT)
            killed = now()
            for pid in dict.fromkeys([self._process.pid, *trainers]):
                os.kill(pid, signal.SIGKILL)
            self._process.wait(_GRACE_SECONDS)
            left, deadline = len(trainers), time.monotonic() + _GRACE_SECONDS
            while left:
                left -= len(gone.poll(max(deadline - time.monotonic(), 0)))
                if left and time.monotonic() > deadline:
                    raise RuntimeError(f"{left} trainers are still there {_GRACE_SECONDS:g} s after SIGKILL")
        return killed

    def finish(self) -> None:
        """Wait until the job ends by itself.

        Raises:
            RuntimeError: it ended with an error
        """
        self._look()
        code = self._process.wait(_SECONDS)
        if code:
            raise RuntimeError(f"the job ended with code {code}")

    def end(self) -> None:
        """Kill what is left of the job, and what it has started."""
        self._look()
        for process in self._started:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs([*self._started], timeout=_GRACE_SECONDS)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(_GRACE_SECONDS)

    def _look(self) -> None:
        """Note the processes, because what a killed process has started is not found later."""
        try:
            self._started |= {*psutil.Process(self._process.pid).children(recursive=True)}
        except psutil.NoSuchProcess:
            return


@contextmanager
def job(task: Mapping[str, Any], ranks: int, marks: str, environment: Mapping[str, str]) -> Iterator[JobProcess]:
    """Start a job; at the end nothing of it is left."""
    process = JobProcess(task, ranks, marks, environment)
    try:
        yield process
    finally:
        process.end()
