"""A run that was killed goes on at its last snapshot, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from snapshots import live

pytestmark = pytest.mark.usefixtures("left_on_purpose")


def test_the_next_run_goes_on_where_the_killed_one_was(tmp_path: Path) -> None:
    (whole,) = live(tmp_path / "whole", recovery=False, steps=6)
    (killed,) = live(tmp_path, steps=4, end="kill")
    (after,) = live(tmp_path, steps=6)
    assert after.restored == (4, "memory") and "restored step 4 from memory" in after.output
    assert after.told["began"] == killed.told["digests"]["4"] == whole.told["digests"]["4"]
    assert after.told["losses"] == {step: whole.told["losses"][step] for step in ("5", "6")}
    assert after.told["digests"]["6"] == whole.told["digests"]["6"]
    assert after.told["steps"] == [], "nothing was written"
