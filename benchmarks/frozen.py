"""What a save of 1 GB of frozen tensors and 20 MB of changing ones costs, beside a save that writes everything.

    python benchmarks/frozen.py FOLDER

Needs the extra `checksum`. Two managers save the same state in turn; the first three saves of each do not count.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import xxhash

from ckpt_component import build_manager
from ckpt_component.events import SaveReport

SAVES, SETTLED = 12, 3


def seconds_of(call: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    """Print the medians."""
    frozen = {f"base.{number}": torch.randn(1 << 20) for number in range(250)}
    trained = {f"adapter.{number}": torch.randn(1 << 18) for number in range(20)}
    source = torch.cat(list(frozen.values()))
    target = torch.zeros_like(source)
    payloads = [tensor.numpy() for tensor in frozen.values()]
    copies, hashes = [], []
    root = Path(sys.argv[1])
    with (
        build_manager("async_persistent", ["checkpoint.reuse.mode=off"], dir=root / "all") as everything,
        build_manager("async_persistent", ["checkpoint.reuse.frozen=[model.base.*]"], dir=root / "changed") as changed,
        ThreadPoolExecutor(torch.get_num_threads()) as threads,
    ):
        for step in range(1, SAVES + 1):
            for tensor in trained.values():
                tensor.add_(1)
            for manager in (everything, changed):
                manager.save(step, {"model": {**frozen, **trained}})
                manager.wait()
                time.sleep(0.5)  # what the disk still does belongs to neither
            copies.append(seconds_of(lambda: target.copy_(source)))
            hashes.append(seconds_of(lambda: list(threads.map(xxhash.xxh3_128_digest, payloads))))

    def median(reports: list[SaveReport], of: Callable[[SaveReport], float]) -> float:
        return statistics.median(map(of, reports[SETTLED:]))

    memcpy, hashed = statistics.median(copies), statistics.median(hashes)
    print(f"1.05 GB: one memcpy takes {memcpy:.4f} s, its hashes {hashed:.4f} s ({hashed / memcpy:.2f} memcpys)")
    durable = median(everything.reports, lambda report: report.committed_s)
    for name, reports in (("everything", everything.reports), ("what changed", changed.reports)):
        stall, committed = median(reports, lambda each: each.stall_s), median(reports, lambda each: each.committed_s)
        print(
            f"{name}: {median(reports, lambda each: each.bytes) / 1e6:.1f} MB written, training waits {stall:.4f} s "
            f"({stall / memcpy:.2f} memcpys), durable after {committed:.4f} s ({committed / durable:.2f})"
        )


if __name__ == "__main__":
    main()
