"""Run a function on several ranks, each in a process of its own, with a deadline for all of them.

The function stands at the top level of a module of its own (a script file), takes (rank, world size, folder), and finds
`torch.distributed` initialized with gloo over a store on a free port. What it prints is returned. Ranks are forked by a
process that has torch loaded, which takes seconds.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forker import Ended, Forker
from kept_configs import compose_once, resolve_once

#: Below pytest's own timeout, so that ranks which hang are ended here, with what they printed and where they are.
_SECONDS = 100.0
_MODULES = (
    "ranks",
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "ckpt_component.factory.graph",
    "ckpt_component.managing.manager",
    "ckpt_component.stagers.shared_memory",
    "ckpt_component.formats.dcp",
)


@functools.cache
def fork_server() -> Forker:
    """The server of this process, which loads torch at the first call and ends with this process."""
    server = Forker(_MODULES, adopts=False)
    atexit.register(server.close)
    return server


def start_ranks(
    script: Path,
    function: str,
    world_size: int,
    folder: Path,
    *,
    whole: bool = False,
    hosts: Sequence[str] = (),
    **env: str,
) -> list[int]:
    """Start the ranks and return their process ids; `finish_ranks` must follow.

    They join their threads and run their exit handlers. What the interpreter does after that takes a second and a half
    of each; with `whole` they do that too. With `hosts` this machine is several, of which each rank has one.
    """
    # As the test has it by now; the server has what was there when it began.
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CKPT_TEST_MEETING": str(folder / f"meeting-{time.monotonic_ns()}"),
    } | env
    arguments = {"script": str(script), "function": function, "world_size": world_size, "folder": str(folder)}
    fork, call = (fork_server().fork_program, "run_rank") if whole else (fork_server().fork, "run_rank_and_leave")
    envs = [{**env, "CKPT_HOST": host} for host in hosts] or [env] * world_size
    return [fork(f"ranks:{call}", envs[rank], rank=rank, **arguments) for rank in range(world_size)]


def finish_ranks(ranks: Sequence[int], timeout: float = _SECONDS) -> list[Ended]:
    """Wait for all of them, kill what is left at the deadline, and return how each ended."""
    deadline = time.monotonic() + timeout
    # One that hangs says where, is killed, and has no exit code.
    return [fork_server().wait(rank, max(deadline - time.monotonic(), 0.1)) for rank in ranks]


def run_ranks(
    script: Path,
    function: str,
    world_size: int,
    folder: Path,
    timeout: float = _SECONDS,
    *,
    whole: bool = False,
    **env: str,
) -> list[str]:
    """Run `function(rank, world_size, folder)` of `script` on all ranks; returns what each printed.

    See `start_ranks` for `whole`.

    Raises:
        AssertionError: a rank did not end well; with the output of all.
    """
    results = finish_ranks(start_ranks(script, function, world_size, folder, whole=whole, **env), timeout)
    told = "\n".join(f"--- rank {rank}: exit {r.code}\n{r.output}" for rank, r in enumerate(results))
    assert all(result.code == 0 for result in results), told
    return [result.output for result in results]


def prepare(**_: Any) -> None:
    """In the server, before the fork: compose the presets that most ranks ask for."""
    import ckpt_component.factory.graph as graph

    graph.compose_checkpoint, graph.resolve_config = compose_once, resolve_once  # type: ignore[assignment, attr-defined]
    for preset in ("async_persistent", "sync"):
        compose_once(preset)


def run_rank_and_leave(**arguments: Any) -> None:
    """`run_rank`, and of the interpreter's end what others can see."""
    try:
        run_rank(**arguments)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def run_rank(script: str, function: str, rank: int, world_size: int, folder: str) -> None:
    """One rank: meet the others, run the function, part."""
    import torch.distributed as dist

    # An interpreter does that when it starts, and this one started before it was said.
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", *sys.path)]
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
