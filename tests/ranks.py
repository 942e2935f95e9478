"""Run a function on several ranks, each in a process of its own, with a deadline for all of them.

The function stands at the top level of a module of its own (a script file), takes (rank, world size, folder), and finds
`torch.distributed` initialized with gloo over a store on a free port. What it prints is returned.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

#: Torch takes seconds to import, several times at once on two cores.
_SECONDS = 120.0


@dataclass(frozen=True)
class RankResult:
    """How one rank ended: exit code (negative: by a signal), and what it printed, stderr included."""

    code: int
    output: str


def start_ranks(script: Path, function: str, world_size: int, folder: Path, **env: str) -> list[subprocess.Popen[str]]:
    """Start the ranks and return them; `finish_ranks` must follow."""
    meeting = folder / f"meeting-{time.monotonic_ns()}"
    return [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, str(script), function, str(rank), str(world_size), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CKPT_TEST_MEETING": str(meeting)} | env,
        )
        for rank in range(world_size)
    ]


def finish_ranks(ranks: list[subprocess.Popen[str]], timeout: float = _SECONDS) -> list[RankResult]:
    """Wait for all of them, kill what is left at the deadline, and return how each ended."""
    deadline = time.monotonic() + timeout
    results = []
    try:
        for process in ranks:
            try:
                output, _ = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate(timeout=10)
                output += f"\nkilled by the test after {timeout:g} s"
            results.append(RankResult(process.returncode, output))
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.communicate(timeout=10)
    return results


def run_ranks(
    script: Path, function: str, world_size: int, folder: Path, timeout: float = _SECONDS, **env: str
) -> list[str]:
    """Run `function(rank, world_size, folder)` of `script` on all ranks; returns what each printed.

    Raises:
        AssertionError: a rank did not end well; with the output of all.
    """
    results = finish_ranks(start_ranks(script, function, world_size, folder, **env), timeout)
    told = "\n".join(f"--- rank {rank}: exit {r.code}\n{r.output}" for rank, r in enumerate(results))
    assert all(result.code == 0 for result in results), told
    return [result.output for result in results]


def _main(script: str, function: str, rank: int, world_size: int, folder: str) -> None:
    """One rank: meet the others, run the function, part."""
    import torch.distributed as dist

    meeting = Path(os.environ["CKPT_TEST_MEETING"])
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        draft = meeting.with_suffix(".draft")
        draft.write_text(str(store.port))
        draft.rename(meeting)
    else:
        deadline = time.monotonic() + _SECONDS
        while not meeting.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("rank 0 did not come up")
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(meeting.read_text()), world_size, is_master=False)
    backend = os.environ.get("CKPT_TEST_BACKEND", "gloo")
    if backend == "nccl":
        import torch

        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    spec = importlib.util.spec_from_file_location("rank_script", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rank_script"] = module
    spec.loader.exec_module(module)
    getattr(module, function)(rank, world_size, Path(folder))
    # The store lives in rank 0, which must not end before the others have read from it.
    store.add("ended", 1)
    deadline = time.monotonic() + 30
    while rank == 0 and store.add("ended", 0) < world_size and time.monotonic() < deadline:
        time.sleep(0.01)
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
