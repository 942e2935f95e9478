"""Every test has sockets of its own, and leaves no server, socket or memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from snapshots import clients, kill, sockets
from waiting import eventually


@pytest.fixture(autouse=True)
def nothing_outlives_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CKPT_RUNTIME_DIR", str(tmp_path / "runtime"))
    yield
    eventually(
        lambda: not clients(), 5, f"snapshot servers left: {[process.cmdline() for process in clients().values()]}"
    )
    assert not [path for path in sockets() if path.is_socket()]


@pytest.fixture
def left_on_purpose() -> Iterator[None]:
    """Kill the servers that the test leaves for their lease, and remove their sockets."""
    yield
    left = clients().values()
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):  # its lease is over
            process.resume()
    kill(*left)
    for path in sockets():
        if path.is_socket():
            path.unlink()
