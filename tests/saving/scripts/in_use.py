"""What the ranks of test_in_use run."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_component import CheckpointInUseError, build_manager


def refused(rank: int, world_size: int, folder: Path) -> None:
    """A start in a folder in which another run saves: refused on all ranks, unless it takes the folder over."""
    with pytest.raises(CheckpointInUseError, match="another run saves there"):
        build_manager("sync", dir=folder / "run")
    build_manager("sync", ["checkpoint.takeover=true"], dir=folder / "run").close()
