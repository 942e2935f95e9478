"""`ckpt watch` on a terminal: follows a run while it saves, and ends with Ctrl-C."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ckpt_component import build_manager

pytest.importorskip("rich")

_CODES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]")


class Screen:
    """What a command prints on a terminal of 100 columns and 30 lines."""

    def __init__(self, *words: str | Path) -> None:
        self._fd, end = pty.openpty()
        env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
        command = [sys.executable, "-m", "ckpt_component.cli", *map(str, words)]
        self.process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=env, start_new_session=True)
        os.close(end)
        self._raw = b""

    def wait_for(self, text: str) -> str:
        """What was printed since the last call, up to a text, without codes of the terminal."""
        deadline = time.monotonic() + 60
        while text.encode() not in (shown := _CODES.sub(b"", self._raw)):
            assert time.monotonic() < deadline, shown.decode()
            if select.select([self._fd], [], [], 0.1)[0]:
                self._raw += self._read()
        self._raw = b""
        return shown.decode()

    def end(self) -> int:
        """Type Ctrl-C, and return the exit code; a full terminal would stop the process, so it is read."""
        self.process.send_signal(signal.SIGINT)
        while self._read():
            pass
        return self.process.wait(60)

    def _read(self) -> bytes:
        try:
            return os.read(self._fd, 65536)
        except OSError:  # EIO: the other side is closed
            return b""

    def close(self) -> None:
        self.process.kill()
        self.process.wait(60)
        os.close(self._fd)


@contextmanager
def screen_of(*words: str | Path) -> Iterator[Screen]:
    screen = Screen(*words)
    try:
        yield screen
    finally:
        screen.close()


def test_a_run_is_followed_from_before_its_first_save(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with screen_of("watch", folder, "--every", "0.05") as screen:
        assert "There is no folder" in screen.wait_for("waiting for the first save")
        with build_manager(
            "sync", ["checkpoint.save.every_steps=1", "checkpoint.save.at_end=false"], dir=folder
        ) as manager:
            for step in (1, 2):
                manager.save(step, {"weight": torch.ones(1000)})
                shown = screen.wait_for(f"step {step}, committed:")
                assert f"saves: {step} committed" in shown and "█" in shown
        assert screen.end() == 0


def test_it_needs_a_terminal(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_component.cli", "watch", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and f"ckpt report {tmp_path} prints the same once" in done.stderr


def test_a_negative_interval_is_refused(tmp_path: Path) -> None:
    with screen_of("watch", tmp_path, "--every=-1") as screen:
        screen.wait_for("--every=-1.0: give seconds above 0")
        assert screen.process.wait(60) == 2
