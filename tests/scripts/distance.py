"""Print as JSON how many functions, files and rooms the third save of a manager visits, and a restore in a new run.

A process of its own, because only threads that start later can be given a profile function before Python 3.12.
"""

from __future__ import annotations

import json
import sys
import threading
from importlib.util import find_spec
from types import FrameType

import torch

#: The folder of the package; that of a checkout, which may have an environment in it, has the same name.
PACKAGE = f"{find_spec('ckpt_component').submodule_search_locations[0]}/"  # type: ignore[union-attr,index]
#: Threads that delete old checkpoints, and that make memory for the first save.
ASIDE = ("ckpt-purge", "ckpt-early")
visited: set[tuple[str, str, int]] = set()
recording = False


def record(on: bool) -> None:
    """Begin or end. Threads have been given `note` already; this one does without while nothing is recorded."""
    global recording
    recording = on
    sys.setprofile(note if on else None)


def note(frame: FrameType, event: str, _: object) -> None:
    """Called at each call of a Python function. Some work is on no save's and no restore's way, in a thread of its own."""
    if recording and event == "call" and not threading.current_thread().name.startswith(ASIDE):
        _, found, path = frame.f_code.co_filename.partition(PACKAGE)
        if found and frame.f_code.co_name[0] != "<":  # neither comprehensions nor lambdas
            visited.add((path, frame.f_code.co_name, frame.f_code.co_firstlineno))


def distance() -> dict[str, int]:
    """What was visited since the last call."""
    files = {path for path, _, _ in visited}
    rooms = {"/".join(path.split("/")[: 2 if path.startswith("core/") else 1]) for path in files}
    found = {"functions": len(visited), "files": len(files), "rooms": len(rooms)}
    if "--list" in sys.argv:
        print(*sorted(files), sep="\n", file=sys.stderr)
    visited.clear()
    return found


def main(folder: str) -> None:
    """Save three times, and restore what was saved."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "step": 1}
    settings = [f"checkpoint.dir={folder}", "checkpoint.save.every_steps=1", "checkpoint.keep.last=2"]
    with build_manager("async_persistent", overrides=settings) as manager:
        for step in (1, 2, 3):
            record(step == 3)
            manager.maybe_save(step, state)
            manager.wait()
        record(False)
        save = distance()
    with build_manager("async_persistent", overrides=settings) as manager:
        record(True)
        step_restored = manager.restore(state)
        record(False)
    print(json.dumps({"step": step_restored, "save": save, "restore": distance()}))


if __name__ == "__main__":
    threading.setprofile(note)
    from ckpt_component import build_manager

    main(sys.argv[1])
