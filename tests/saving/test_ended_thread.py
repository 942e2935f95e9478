"""A save whose thread is ended by something that nobody expects has an end too: who waits for it is told."""

from __future__ import annotations

import torch

from ckpt_component import build_manager
from ckpt_component.testing import Disk, Fault, PowerCut, SimulatedFiles

ROOT = "/runs/one"


def save_two(disk: Disk, faults: dict[int, Fault]) -> tuple[int, int, bool]:
    """Save two steps; returns how many operations there were before the second save and in all, and if it was cut."""
    files = SimulatedFiles(disk, faults)
    files.make_folders(ROOT)
    overrides = ["checkpoint.save.at_end=false", "checkpoint.keep.last=1", "checkpoint.events=false"]
    manager = build_manager(
        "sync", [*overrides, "checkpoint.save.every_steps=null"], dir=ROOT, storage_of=lambda path: files
    )
    manager.save(1, {"weight": torch.ones(3)})
    before, is_cut = len(files.operations), False
    try:
        manager.save(2, {"weight": torch.ones(3)})
        manager.wait()
        manager.close()
    except PowerCut:
        is_cut = True
    return before, len(files.operations), is_cut


def test_a_save_is_not_waited_for_without_end() -> None:
    before, after, _ = save_two(Disk(), {0: Fault("fail")})
    cuts = [save_two(Disk(), {number: Fault("cut")})[2] for number in range(before + 1, after)]
    assert len(cuts) > 10 and sum(cuts) > 10
