"""What a training loop loses while another process copies, sums or writes as many bytes as a save: no save loses less.

    python benchmarks/floor.py FOLDER [PAIRS]

The loop is that of `ckpt-bench` with steps of 0.2 s. Cycles with the other process at work and without it take turns.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import zlib
from multiprocessing.connection import Connection

import torch
from ckpt_bench.measure.loop_clock import LoopClock
from ckpt_bench.measure.raw import block_of, copy, write
from ckpt_bench.measure.training_loop import Loop

NBYTES, STEP_SECONDS, STEPS = 1_490_000_000, 0.2, 10
#: How long to wait for the other process.
SECONDS = 600
WORK = ("copy", "crc32", "direct write")


def work(requests: Connection, folder: str) -> None:
    """Do what is requested, one at a time, until the other end closes."""
    os.nice(10)  # like the writer process
    torch.set_num_threads(1)
    source, target = block_of(NBYTES), block_of(NBYTES)
    while True:
        try:
            request = requests.recv()
        except EOFError:
            return
        if request == "copy":
            copy(source, target)
        elif request == "crc32":
            zlib.crc32(source)
        elif write(source, NBYTES, folder, 1, direct=True) is None:
            raise SystemExit(f"{folder} has no direct I/O. Name a folder on a disk.")
        requests.send(request)


def main() -> None:
    """Print a line for each kind of work."""
    folder, pairs = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 15
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("spawn").Process(target=work, args=(theirs, folder), daemon=True)
    worker.start()
    theirs.close()
    torch.set_num_threads(1)
    loop = Loop({"weight": torch.zeros(NBYTES // 4)}, 1, STEP_SECONDS)

    def cycle(request: str | None = None) -> float:
        clock = LoopClock()
        if request is not None:
            ours.send(request)
        for _ in range(STEPS):
            loop.step()
        seconds = clock.spent().wall_s
        if request is not None:
            if not ours.poll(SECONDS):
                raise SystemExit(f"The other process did not finish '{request}' within {SECONDS} s.")
            ours.recv()
        return seconds

    for request in WORK:
        cycle(request)
    lost: dict[str, list[float]] = {request: [] for request in WORK}
    before = cycle()
    for _ in range(pairs):
        for request in WORK:
            busy, after = cycle(request), cycle()
            lost[request].append(busy - (before + after) / 2)
            before = after
    ours.close()
    worker.join(30)
    for request, seconds in lost.items():
        low, middle, high = statistics.quantiles(seconds, n=4)
        print(f"{request}: {middle:.3f} s lost ({low:.3f} to {high:.3f}, the middle half of {pairs})")


if __name__ == "__main__":
    main()
