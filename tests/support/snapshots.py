"""Runs whose snapshots outlive them: start them with a plan, see what they tell, and see which servers there are."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from ranks import finish_ranks, start_ranks
from waiting import eventually

from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.locate import storage_at
from ckpt_component.errors import CheckpointNotFoundError
from ckpt_component.hosts.client import HostClient
from ckpt_component.hosts.snapshot_source import copy_in_memory
from ckpt_component.hosts.wire import SocketPlace

TRAINING = Path(__file__).parents[1] / "recovery" / "scripts" / "training.py"
MEMORY = ["checkpoint/recovery=host", "checkpoint.recovery.every_steps=1"]
_MARK = "LIFE "


@dataclass(frozen=True)
class Life:
    """How one rank of a run has lived.

    Attributes:
        code: its exit code; negative: the signal that killed it
        told: what it told, by name
        output: its log, and what else it printed
    """

    code: int | None
    told: Mapping[str, Any]
    output: str

    @property
    def restored(self) -> tuple[int | None, str | None]:
        """The step that it began with, and from where."""
        return self.told["restored"], self.told["source"]


def start_lives(folder: Path, *, world_size: int = 1, hosts: Sequence[str] = (), **plan: Any) -> list[int]:
    """Start a run in `folder / "run"`; see `scripts/training.py` for the plan. Returns its processes.

    With `hosts`, each rank is on one of them.
    """
    folder.mkdir(exist_ok=True)
    whole, told = plan.get("end") == "outside", json.dumps(plan)
    size = len(hosts) or world_size
    return start_ranks(TRAINING, "train", size, folder, whole=whole, hosts=hosts, CKPT_TEST_PLAN=told)


def finish_lives(ranks: list[int], timeout: float = 60) -> list[Life]:
    lives = []
    for ended in finish_ranks(ranks, timeout):
        told: dict[str, Any] = {}
        for line in ended.output.splitlines():
            if line.startswith(_MARK):
                told |= json.loads(line.removeprefix(_MARK))
        lives.append(Life(ended.code, told, ended.output))
    return lives


def live(folder: Path, *, world_size: int = 1, hosts: Sequence[str] = (), **plan: Any) -> list[Life]:
    """Run to the end, which the plan says. A rank that ends otherwise fails the test, with what all printed."""
    lives = finish_lives(start_lives(folder, world_size=world_size, hosts=hosts, **plan))
    codes = {"kill": -signal.SIGKILL, "raise": 1, "outside": 1, "exit": 1}  # the fork server prints what is raised
    expected = [codes.get(plan.get("end", "close"), 0)] * len(lives)
    found = [life.code for life in lives]
    assert found == expected, "\n--- next rank\n".join(f"{life.code}: {life.output}" for life in lives)
    return lives


@contextlib.contextmanager
def paused(folder: Path, *, world_size: int = 1, **plan: Any) -> Iterator[list[Life]]:
    """A run that waits inside the block, at its `pause` or its end `hang`. Afterwards the list has its lives."""
    lives = list[Life]()
    ranks = start_lives(folder, world_size=world_size, **plan)
    try:
        for rank in range(world_size):
            eventually((folder / f"ready-{rank}").exists, 40)
        yield lives
    finally:
        (folder / "go").touch()
        lives += finish_lives(ranks)


def in_memory(path: str | Path) -> bool:
    """Whether a server has a checkpoint whose path on disk this is."""
    try:
        return bool(copy_in_memory(str(path), FileStorage(), storage_at))
    except CheckpointNotFoundError:
        return False


def tell(**values: Any) -> None:
    """In a run: tell the test something."""
    print(_MARK + json.dumps(values), flush=True)


def clients() -> dict[int, psutil.Process]:
    """The writer processes with the test's folder of sockets, by process id."""
    ours, found = os.environ["CKPT_RUNTIME_DIR"], {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_writer = any(
                name in argument for argument in process.cmdline() for name in ("core.writing", "hosts.keep")
            )
            if is_writer and process.environ().get("CKPT_RUNTIME_DIR") == ours:
                found[process.pid] = process
    return found


def sockets() -> list[Path]:
    """All that is in the folder of sockets, other folders included."""
    return sorted(Path(os.environ["CKPT_RUNTIME_DIR"]).rglob("*"))


def client_of(rank: int) -> psutil.Process:
    """The server of a rank, found by its socket."""
    (path,) = [path for path in sockets() if path.name == str(rank) and path.is_socket()]
    client = HostClient(SocketPlace(path.parents[1].name, path.parent.name), rank)
    try:
        return psutil.Process(client.about()["pid"])
    finally:
        client.close()


def lose(*hosts: str) -> None:
    """Hosts are lost, whose trainers have ended: kill their servers, and remove their sockets."""
    kill(*(process for process in clients().values() if process.environ().get("CKPT_HOST") in hosts))
    for host in hosts:
        shutil.rmtree(Path(os.environ["CKPT_RUNTIME_DIR"], host))


def kill(*processes: psutil.Process) -> None:
    """Send SIGKILL, and wait until they are gone."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # its lease is over
            process.kill()
    gone(*processes)


def gone(*processes: psutil.Process, seconds: float = 20) -> None:
    """Wait until the processes have ended."""
    _, left = psutil.wait_procs(processes, timeout=seconds)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in left), f"{left} have not ended"


def images_of(client: psutil.Process) -> list[Path]:
    """The blocks of memory that a server has, the largest first."""
    found: dict[int, Path] = {}
    for path in Path(f"/proc/{client.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(path).startswith("/memfd:"):
                found[path.stat().st_ino] = path
    return sorted(found.values(), key=lambda path: -path.stat().st_size)


def flip_images(client: psutil.Process, pattern: bytes) -> None:
    """Flip a bit of the first place in each of the server's images where these bytes are."""
    hits = 0
    for path in images_of(client):
        with open(path, "r+b", buffering=0) as image:
            place = image.read(path.stat().st_size).find(pattern)
            if place >= 0:
                os.pwrite(image.fileno(), bytes([pattern[0] ^ 1]), place)
                hits += 1
    assert hits, "no image has these bytes"


@contextlib.contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """Inside the block, the process does nothing."""
    process.suspend()
    try:
        yield
    finally:
        process.resume()
