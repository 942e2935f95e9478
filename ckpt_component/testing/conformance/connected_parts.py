"""One part under test among parts that work: saves with it, and what was saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

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
from ...stagers.live import LiveStager
from ...state.structure import Structure
from .leftovers import PATIENCE_S, nothing_left, within

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
