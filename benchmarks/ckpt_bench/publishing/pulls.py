"""How soon receivers have a version: a folder that is brought to it once, and one that follows."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from ..measure.target_files import fill_cache, remove
from .published_run import PublishedRun
from .spent import Spent, SpentClock

_PULL = (sys.executable, "-m", "ckpt_component.cli", "pull")
_SECONDS = 300.0
#: The first version of a receiver is whole, and its first delta has no spare folder yet.
_FIRST_DELTAS = 1


def measure_pulls(state: str, pairs: int, folder: str) -> Iterator[dict[str, Any]]:
    """Pull whole versions and deltas, each by a process as one starts it by hand; then follow deltas.

    Args:
        state: name of the state
        pairs: number of versions of each kind
        folder: for the run and the receivers

    Yields:
        `bytes` of the weights, and lists of seconds: `pull_whole` and `pull_delta`, with the start of the process, and
        `pull_whole_cpu` and `pull_delta_cpu`; `follow_delta`, of a receiver that follows and has a spare folder; `lag`,
        from the commit of the checkpoint until that receiver has the version, and of that `lag_publish`, until the
        version is there.
    """
    with PublishedRun(state, folder) as run:
        run.save()
        run.settle()
        run.publish()
        copy = os.path.join(folder, "copy")
        whole = list[Spent]()
        for _ in range(pairs):
            if whole:
                remove(copy)
            os.sync()
            fill_cache(run.to)
            whole.append(_pull(run.to, copy))
        yield {"bytes": run.weights.nbytes, **_lists("pull_whole", whole)}
        deltas = list[Spent]()
        for _ in range(pairs):
            run.save()
            run.publish()
            run.settle()
            fill_cache(copy)
            deltas.append(_pull(run.to, copy))
        yield _lists("pull_delta", deltas)
        remove(copy)
        with _Following(run.to, copy) as receiver:
            receiver.landed()
            rows = [_follow(run, receiver) for _ in range(_FIRST_DELTAS + pairs)][_FIRST_DELTAS:]
        yield {name: [row[name] for row in rows] for name in rows[0]}


def _lists(name: str, spent: Sequence[Spent]) -> dict[str, list[float]]:
    return {name: [each.seconds for each in spent], f"{name}_cpu": [each.cpu_s for each in spent]}


def _pull(source: str, target: str) -> Spent:
    clock = SpentClock()
    done = subprocess.run([*_PULL, source, target], capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"ckpt pull ended with code {done.returncode}: {_last_line(done.stderr)}")
    return clock.spent()


def _follow(run: PublishedRun, receiver: _Following) -> dict[str, float]:
    run.save()
    committed = SpentClock()
    published = run.publish().spent.seconds
    landed = receiver.landed()
    return {"follow_delta": landed["seconds"], "lag": committed.spent().seconds, "lag_publish": published}


class _Following:
    """A process that follows the versions of a source. A context manager."""

    def __init__(self, source: str, target: str) -> None:
        self._process = subprocess.Popen(
            [*_PULL, source, target, "--follow", "--json"], stdout=subprocess.PIPE, text=True
        )
        self._lines = queue.SimpleQueue[str]()
        threading.Thread(target=self._read, name="bench-pull", daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None  # as it is captured
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def landed(self) -> dict[str, Any]:
        """What it says of the next version that its folder is at."""
        line = self._lines.get(timeout=_SECONDS)
        if not line:
            raise RuntimeError(f"ckpt pull --follow ended with code {self._process.wait(_SECONDS)}")
        found: dict[str, Any] = json.loads(line)
        return found

    def __enter__(self) -> _Following:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_SECONDS)
        finally:
            self._process.kill()


def _last_line(text: str) -> str:
    lines: Sequence[str] = text.strip().splitlines()
    return lines[-1] if lines else "no message"
