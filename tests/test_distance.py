"""How far a save and a restore of a manager travel through the code base: a capability that lengthens the way is noticed.

The bounds are what was reached. Lower one when the way has become shorter; raise one only with the reason in the commit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "distance.py"
SAVE = {"functions": 202, "files": 49, "packages": 16}
RESTORE = {"functions": 299, "files": 64, "packages": 17}
#: On a busy machine something may be waited for, which has functions of its own.
TRIES = 3


def ways(folder: Path) -> dict[str, dict[str, int]]:
    """What a save and a restore visit, by what is counted."""
    command = [sys.executable, str(SCRIPT), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    found = json.loads(done.stdout)
    assert found.pop("step") == 7
    return {trip: found[trip] for trip in ("save", "restore")}


def too_far(found: dict[str, dict[str, int]]) -> list[str]:
    """What goes beyond its bound."""
    bounds = {"save": SAVE, "restore": RESTORE}
    return [
        f"a {trip} visits {found[trip][what]} {what}, more than {bound}"
        for trip, each in bounds.items()
        for what, bound in each.items()
        if found[trip][what] > bound
    ]


def test_the_way_of_a_save_and_of_a_restore(tmp_path: Path) -> None:
    for number in range(TRIES):
        found = too_far(ways(tmp_path / str(number)))
        if not found:
            return
    pytest.fail("; ".join(found))
