"""One part under test among parts that work: saves with it, and what was saved."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from ...callers.write_callers import InlineCaller, WriteCaller
from ...config.hydra.parts import build_part
from ...config.schema import PARTS
from ...core.commit import commit
from ...core.coordination import LocalCoordinator
from ...core.options import ResolvedTimeouts
from ...core.storage.files import FileStorage
from ...core.storage.new_names import new_token
from ...core.writing.request import WriteOptions, WriteRequest
from ...errors import CheckpointStageError
from ...formats.writer import Writer
from ...loading.reader import Reader
from ...stagers.base import Snapshot, Stager
from ...stagers.shared_memory import LiveStager
from ...state.structure import Structure

T = TypeVar("T")

#: Seconds after which something that must happen is taken not to happen.
PATIENCE_S = 20.0


def within(seconds: float, call: Callable[[], T]) -> T:
    """Call a function that must return in time; raises what it raises, and AssertionError when it is late."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return done.result(seconds)
    except FutureTimeoutError as error:  # in Python 3.10 no TimeoutError
        if done.done():
            raise
        raise AssertionError(f"it was not over after {seconds:g} s") from error


@contextmanager
def nothing_left(seconds: float = PATIENCE_S) -> Iterator[None]:
    """Raise AssertionError if what is done within leaves a process, shared memory, or a name in `/dev/shm`."""
    before = _held()
    yield
    deadline = time.monotonic() + seconds
    while (left := sorted(_held() - before)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, f"left behind: {left}"


def memfds(pid: int) -> set[str]:
    """The anonymous shared memory that a process holds, open or mapped; none if it has ended."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd") if psutil.pid_exists(pid) else ():
        with suppress(FileNotFoundError):  # it was closed just now
            if os.readlink(f"/proc/{pid}/fd/{name}").startswith("/memfd:"):
                found.add(f"inode {os.stat(f'/proc/{pid}/fd/{name}').st_ino}")
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if psutil.pid_exists(pid) else ():
        fields = line.split(maxsplit=5)
        if len(fields) > 5 and fields[5].startswith("/memfd:"):
            found.add(f"inode {fields[4]}")
    return found


def children() -> list[psutil.Process]:
    """The running processes that this one started, and theirs."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def _held() -> set[str]:
    processes = {f"process {child.pid}" for child in children()}
    names = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")} if os.path.isdir("/dev/shm") else set()
    return processes | names | {f"shared memory, {each}" for each in memfds(os.getpid())}


def example_state(number: int, *, objects: bool = True) -> dict[str, Any]:
    """A state of every kind of tensor, with bytes that depend on its number.

    Args:
        number: below 128
        objects: with values that are not tensors
    """
    generator = torch.Generator().manual_seed(number)
    base = torch.randn(12, 20, generator=generator)
    model = {
        "weight": torch.randn(300, 200, generator=generator),
        "transposed": base.t(),
        "view": base[2:5],
        "column": torch.randn(5, 4, generator=generator)[:, 1],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(float(number)),
        "half": torch.full((7, 5), number, dtype=torch.bfloat16),
        "bytes": torch.full((9,), number, dtype=torch.uint8),
        "flags": torch.tensor([number % 2 == 0, True]),
        "conjugated": torch.complex(base[0], base[1]).conj(),
    }
    model["tied"] = model["weight"]
    values = {"step": number, "note": f"number {number}", "nested": {1: [number, None], "none": {}}}
    return {"model": model, **(values if objects else {})}


def large_state(number: int) -> dict[str, torch.Tensor]:
    """A state whose copy takes some milliseconds; every byte is the number."""
    return {f"weight{each}": torch.full((2 << 20,), number, dtype=torch.uint8) for each in range(4)}


def change(state: Mapping[str, Any]) -> None:
    """Change every tensor in place, as training does."""
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.copy_(torch.ones(value.shape).to(value.dtype))
        elif isinstance(value, dict):
            change(value)
        elif isinstance(value, list):
            value.append("changed")


def differences(found: Any, expected: Any, key: str = "state") -> list[str]:
    """The keys at which two states are not the same to the bit."""
    if isinstance(expected, dict):
        if not isinstance(found, dict) or found.keys() != expected.keys():
            return [f"{key} has other keys"]
        return [text for name in expected for text in differences(found[name], expected[name], f"{key}.{name}")]
    if isinstance(expected, torch.Tensor):
        same = (
            isinstance(found, torch.Tensor)
            and (found.dtype, found.shape) == (expected.dtype, expected.shape)
            and torch.equal(_bytes(found), _bytes(expected))
        )
        return [] if same else [f"{key} has other bytes"]
    return [] if found == expected else [f"{key} is {found!r} instead of {expected!r}"]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().contiguous().flatten().view(torch.uint8)


_BASES: Mapping[str, type[Any]] = {"stager": Stager, "caller": WriteCaller, "writer": Writer}


def registered(kind: str) -> dict[str, Callable[[], Any]]:
    """The parts of this package, for the parameters of a fixture: option of `checkpoint/<kind>` -> builds the part.

    Args:
        kind: `stager`, `caller` or `writer`
    """
    targets = {option: schema()._target_ for option, schema in PARTS[kind].items()}
    return {option: partial(build_part, kind, {"_target_": target}, _BASES[kind]) for option, target in targets.items()}


class ConnectedParts:
    """A part under test, connected to parts that work, with a folder for its checkpoints.

    A context manager, which connects the parts, closes them, and checks that nothing is left.

    Args:
        folder: an empty folder
        stager: takes the snapshots; not yet connected
        writer: lays them out
        caller: writes them; None: one that writes here
        shared: whether the memory must be visible to another process; None: as the caller needs it
    """

    def __init__(
        self,
        folder: Path,
        stager: Stager,
        writer: Writer,
        caller: WriteCaller | None = None,
        *,
        shared: bool | None = None,
    ) -> None:
        self.folder = folder
        self.stager = stager
        self.writer = writer
        self.caller = InlineCaller() if caller is None else caller
        self._shared = self.caller.in_other_process if shared is None else shared
        self._storage = FileStorage(warns=False)
        self._sidecars: dict[int, Mapping[str, bytes]] = {}
        self._exit = ExitStack()

    def __enter__(self) -> ConnectedParts:
        with ExitStack() as stack:
            stack.enter_context(nothing_left())
            connect(self.stager, self.writer, shared=self._shared)
            stack.callback(within, PATIENCE_S, self.stager.close)
            stack.callback(within, PATIENCE_S, self.caller.close)
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._exit.__exit__(*error)

    def take(self, state: Mapping[str, Any], wait_s: float = PATIENCE_S) -> Snapshot:
        """Take a snapshot, as a save does.

        Args:
            state: the state
            wait_s: seconds to wait for memory
        """
        plan = self.stager.inspect(state)
        return self.stager.take(replace(plan, wait_until=time.monotonic() + wait_s))

    def request(self, snapshot: Snapshot, options: WriteOptions | None = None) -> WriteRequest:
        """Begin an attempt to save a snapshot, once it is complete."""
        snapshot.staged.result(PATIENCE_S)
        token, encoded = new_token(), snapshot.encoded
        attempt = commit.new_attempt(self._storage, str(self.folder / f"save_{token}"), token)
        commit.begin(attempt)
        if encoded.table.number not in self._sidecars:
            self._sidecars[encoded.table.number] = self.writer.index([encoded.rank_index()])
        return WriteRequest(
            self._storage,
            attempt,
            0,
            1,
            encoded.table,
            encoded.object_blobs,
            snapshot.source,
            options or self.writer.options,
            {"format": self.writer.format},
            ResolvedTimeouts(close=PATIENCE_S),
            self._sidecars[encoded.table.number],
        )

    def publish(self, request: WriteRequest, result: Mapping[str, Any]) -> str:
        """Commit what was written. Returns the path of the checkpoint."""
        commit.publish(request.attempt, [result], request.sidecars or {}, request.manifest_fields)
        return request.attempt.target

    def save(self, snapshot: Snapshot) -> str:
        """Write and commit a snapshot. Returns the path of the checkpoint."""
        request = self.request(snapshot)
        result = self.caller.run(request, time.monotonic() + PATIENCE_S)
        snapshot.copied.result(PATIENCE_S)
        path = self.publish(request, result)
        self.caller.settle()
        return path

    def stored(self, snapshot: Snapshot) -> Any:
        """Save a snapshot, and load what was saved."""
        return load(self.save(snapshot))


def load(path: str) -> Any:
    """Load a checkpoint, with all its checksums verified."""
    return Reader(0, 1).read(path)[0]


def connect(stager: Stager, writer: Writer, *, shared: bool = False) -> Stager:
    """Connect a stager, as the factory does for one rank. Returns the stager."""
    stager.connect(writer, ranks=LocalCoordinator(), shared=shared, timeout=PATIENCE_S)
    return stager


def structure_of(writer: Writer, state: Mapping[str, Any]) -> Structure:
    """The structure of a state, for `Writer.plan`."""
    return connect(LiveStager(), writer).inspect(state).structure


def holds_objects(writer: Writer) -> bool:
    """Whether a format takes values that are not tensors."""
    try:
        writer.plan(structure_of(writer, {"value": 1}), 0)
    except CheckpointStageError:
        return False
    return True
