"""Print as JSON how many functions, files and packages the later saves of a manager visit, and a restore in a new run.

A process of its own, because only threads that start later can be given a profile function before Python 3.12.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import FrameType

import torch

#: The folder of the package; that of a checkout, which may have an environment in it, has the same name.
PACKAGE = f"{find_spec('ckpt_component').submodule_search_locations[0]}/"  # type: ignore[union-attr,index]
#: Stand where the standard library stood, whose functions do not count either: time, threads, executors, connections, and
#: waiting, which a machine does or not.
OUTSIDE = ("core/outside.py", "core/lane.py", "core/sockets.py", "core/waits.py")
#: Threads that delete old checkpoints, and that make memory for the first save.
ASIDE = ("ckpt-purge", "ckpt-early")
visited: set[tuple[str, str, int]] | None = None


@contextmanager
def recording() -> Iterator[set[tuple[str, str, int]]]:
    """Record what is visited within; threads that were started before have been given `note` already."""
    global visited
    visited = trip = set[tuple[str, str, int]]()
    sys.setprofile(note)
    try:
        yield trip
    finally:
        sys.setprofile(None)
        visited = None


def note(frame: FrameType, event: str, _: object) -> None:
    """Called at each call of a Python function. Some work is on no save's and no restore's way, in a thread of its own."""
    trip = visited
    if trip is not None and event == "call" and not threading.current_thread().name.startswith(ASIDE):
        _, found, path = frame.f_code.co_filename.partition(PACKAGE)
        if found and path not in OUTSIDE and frame.f_code.co_name[0] != "<":  # neither comprehensions nor lambdas
            trip.add((path, frame.f_code.co_name, frame.f_code.co_firstlineno))


def distance(trips: list[set[tuple[str, str, int]]]) -> dict[str, int]:
    """What each of the trips has visited: where the machine is busy, one may also go where another waits."""
    common = set.intersection(*trips)
    if "--list" in sys.argv:
        print(*sorted(f"{path}:{line} {name}" for path, name, line in common), sep="\n", file=sys.stderr)
    files = {path for path, _, _ in common}
    packages = {"/".join(path.split("/")[: 2 if path.startswith("core/") else 1]) for path in files}
    return {"functions": len(common), "files": len(files), "packages": len(packages)}


def main(folder: str) -> None:
    """Save some times, and restore what was saved."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "step": 1}
    settings = [f"checkpoint.dir={folder}", "checkpoint.save.every_steps=1", "checkpoint.keep.last=2"]
    saves = []
    with build_manager("async_persistent", overrides=settings) as manager:
        for step in range(1, 8):
            with recording() as trip:
                manager.maybe_save(step, state)
                manager.wait()
            saves.append(trip)
    with build_manager("async_persistent", overrides=settings) as manager, recording() as restore:
        step_restored = manager.restore(state)
    print(json.dumps({"step": step_restored, "save": distance(saves[2:]), "restore": distance([restore])}))


if __name__ == "__main__":
    threading.setprofile(note)
    from ckpt_component import build_manager

    main(sys.argv[1])
