"""How far a save and a restore of a manager travel through the code base: a capability that lengthens the way is noticed.

The bounds are what was reached. Lower one when the way has become shorter; raise one only with the reason in the commit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "scripts" / "distance.py"
SAVE = {"functions": 202, "files": 54, "packages": 16}
RESTORE = {"functions": 299, "files": 76, "packages": 17}


def test_the_way_of_a_save_and_of_a_restore(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    found = json.loads(done.stdout)
    assert found["step"] == 7
    for trip, bounds in (("save", SAVE), ("restore", RESTORE)):
        assert all(found[trip][what] <= bound for what, bound in bounds.items()), (trip, found[trip], bounds)
