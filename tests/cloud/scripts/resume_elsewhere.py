"""A rank that resumes from a bucket what one rank saved there."""

from __future__ import annotations

import os
from pathlib import Path

from faults.invariants import blank_state, differences, state_of

from ckpt_component import build_manager


def resume(rank: int, world_size: int, folder: Path) -> None:
    with build_manager("sync", ["checkpoint.save.at_end=false"], dir=os.environ["CKPT_TEST_ROOT"]) as manager:
        target = blank_state()
        step = manager.restore(target)
        assert step is not None and not differences(target, state_of(step))
        print(f"resumed {step}")
