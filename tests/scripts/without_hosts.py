"""Save, restore and load weights without recovery, on one host; print which modules of `hosts` that imports."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

#: Of a run that has a local folder in front of its own.
LOCAL = ("checkpoint.local.dir={}/near", "checkpoint.upload.every_steps=1")


def imported() -> list[str]:
    """The modules of the package that are there."""
    return sorted(name for name in sys.modules if f"{name}.".startswith("ckpt_component.hosts."))


def save_and_restore(folder: Path, *overrides: str) -> None:
    """Two runs in a folder: the second one goes on from the first."""
    from ckpt_component import build_manager

    model = torch.nn.Linear(4, 4)
    for began in (None, 1):
        with build_manager("async_persistent", overrides, dir=folder) as manager:
            assert manager.restore({"model": model}) == began
            manager.save((began or 0) + 1, {"model": model})


def on_a_rank(rank: int, world_size: int, folder: Path) -> None:
    """Two ranks of one job."""
    save_and_restore(folder / "far", *(text.format(folder) for text in LOCAL))
    print("imported", json.dumps(imported()))


def main(folder: Path) -> None:
    """One process: a folder, a folder with a local one in front of it, and an evaluation."""
    from ckpt_component import build_checkpointer, load_weights

    save_and_restore(folder / "plain")
    save_and_restore(folder / "far", *(text.format(folder) for text in LOCAL))
    assert load_weights(torch.nn.Linear(4, 4), folder / "plain") == 2
    with build_checkpointer("sync") as checkpointer:
        checkpointer.load(str(folder / "plain" / "iter_0000002"))
    print(json.dumps(imported()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
