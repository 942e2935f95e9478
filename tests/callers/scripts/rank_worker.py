"""What the processes of test_ranks run. Standard library alone."""

from __future__ import annotations

from typing import Any

import worker_calls as calls


def write_when_open(gate: str, state: Any, path: str) -> None:
    calls.wait_for(gate)
    calls.append(path, str(state))
