"""The background writer process: it writes staged images to files and imports no torch.

The frames of the trainer (see `framing`): `arena` passes a memfd; `table` passes the layout of a structure; `write`
requests one save and is answered by `done` or `failed`; `decided` means that the trainer committed or gave up the last
save; `close` asks the process to exit. When the trainer has died, rank 0's process first finishes a save that was
written but not decided (`orphan_commit`). A process that keeps snapshots in memory understands more (`keeper`).
"""

from __future__ import annotations

import math
import os
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from ..commit.liveness import AttemptLock
from ..memory.huge_pages import map_shared
from ..processes.framing import Channel, Frame
from ..processes.remote_error import describe_failure
from ..processes.serve import serve
from ..storage.storage import Storage
from .cached_files import CachedFiles
from .orphan_commit import UndecidedSave
from .request import WriteRequest, WriteResult, storage_in
from .write_job import run_write_job
from .write_table import WriteTable


class MappedArena:
    """A mapped arena of the trainer: the image as one block that begins and ends at page boundaries.

    Args:
        number: of the arena
        fd: its descriptor, which belongs to this object
        nbytes: its size
    """

    lasting = True

    def __init__(self, number: int, fd: int, nbytes: int) -> None:
        self.number = number
        self.fd = fd
        self.nbytes = nbytes
        try:
            self._memory = map_shared(fd, nbytes, writable=False)
        except BaseException:
            os.close(fd)
            raise

    def buffers(self, start: int, end: int, *, whole: bool = False) -> list[memoryview]:
        """Return one slice, whether or not `whole` is set."""
        return [self._memory[start:end]]

    def close(self) -> None:
        """Let go of the memory, which is freed when nobody else has it."""
        self._memory = memoryview(b"")
        os.close(self.fd)


class ByteWorker:
    """The state of the writer process: mapped arenas, layout tables, and the undecided save."""

    def __init__(self, trainer: Channel) -> None:
        self._trainer = trainer
        self._arenas: dict[int, MappedArena] = {}
        #: By number: a table, the compressed sidecars of a commit from here, and where the checksum's package is.
        self._tables: dict[int, tuple[WriteTable, dict[str, bytes], str | None]] = {}
        self._undecided: UndecidedSave | None = None
        self._cached = CachedFiles()
        self._keeps_cached = False
        #: The last storage that needed a package, and what it was made from.
        self._storage: tuple[list[Any], Storage] | None = None

    def handle_frames(self) -> bool:
        """Handle frames until the trainer asks for the end, or has died; returns whether it has asked."""
        self._trainer.send({"kind": "ready", "pid": os.getpid()})
        try:
            while True:
                frame = self._next_frame()
                if frame is None:
                    if self._undecided is not None:
                        self.outlive_trainer(self._undecided)
                    return False
                header, blob, fds = frame
                if header["kind"] == "close":
                    return True
                if not self._handle(header["kind"], header, blob, fds):
                    self._refuse(header["kind"])
                    return True
        finally:
            self._forget()
            while self._arenas:
                self._arenas.popitem()[1].close()

    def _handle(self, kind: str, header: Mapping[str, Any], blob: memoryview, fds: Sequence[int]) -> bool:
        """Handle one frame; False: its kind is unknown."""
        if kind == "arena":
            self._map_arena(header, fds[0])
        elif kind == "table":
            self._take_table(header, blob)
        elif kind == "write":
            self._write(header, blob, fds)
        elif kind == "decided":
            self._settle()
        else:
            return False
        return True

    def outlive_trainer(self, undecided: UndecidedSave) -> None:
        """The trainer has died, and left a save that this rank has written."""
        if undecided.request.rank == 0:
            undecided.finish()

    def _refuse(self, kind: object) -> None:
        """Report a frame of an unknown kind, and handle no others: they too may have another meaning."""
        error = f"the trainer sent a frame of the unknown kind {kind!r}; they may be of different releases"
        print(f"ckpt writer: {error}", file=sys.stderr)
        self._trainer.send({"kind": "failed", "id": None, "error": error, "errno": None, "traceback": error})
        while (frame := self._next_frame()) is not None and frame[0]["kind"] != "close":
            for fd in frame[2]:
                os.close(fd)

    def _next_frame(self) -> Frame | None:
        """Wait for the next frame, and meanwhile read files; None if the trainer has died."""
        while True:
            pause = self._cached.pause
            try:
                return self._trainer.receive(math.inf if pause is None else time.monotonic() + pause)
            except TimeoutError:
                self._cached.read_piece()

    def _map_arena(self, header: Mapping[str, Any], fd: int) -> None:
        for number in header["retired"]:
            if number in self._arenas:
                self._arenas.pop(number).close()
        self._arenas[header["id"]] = MappedArena(header["id"], fd, header["size"])

    def _take_table(self, header: Mapping[str, Any], blob: memoryview) -> None:
        self._tables = {}  # free the last table before the new one takes memory
        sizes, files = header["table"]["sizes"], header["sidecars"]
        pieces = _pieces(blob, [*sizes, *(size for _, size in files)])
        # Copied, because views would keep the whole frame in memory.
        table = WriteTable.from_parts(header["table"], [memoryview(bytes(p)) for p in pieces[: len(sizes)]])
        sidecars = {name: zlib.compress(piece, 1) for (name, _), piece in zip(files, pieces[len(sizes) :], strict=True)}
        self._tables = {table.number: (table, sidecars, header["checksum_home"])}

    def _write(self, job: Mapping[str, Any], blob: memoryview, held: Sequence[int]) -> None:
        """Write one save. A failure is sent as the answer and fails only this save. Closes what is `held`."""
        self._forget()
        lock: AttemptLock | None = None
        until = time.monotonic() + job["seconds"]
        self._keeps_cached = job.get("keeps_cached", False)
        try:
            table, sidecars, checksum_home = self._tables[job["table"]]
            fs, arena = self._storage_in(job["request"]), self._arenas[job["arena"]]
            request = WriteRequest.from_parts(job["request"], fs, table, blob, arena, held)
            lock = AttemptLock(request.fs, request.attempt)
            result = self._run(request, arena, checksum_home)
        except Exception as error:
            if lock is not None:
                lock.close()
            answer = {"kind": "failed", "id": job["id"], **describe_failure(error)}
        else:
            self._undecided = UndecidedSave(request, result, sidecars, lock, until)
            answer = {"kind": "done", "id": job["id"], "result": result}
        finally:
            for fd in held:
                os.close(fd)
        self._trainer.send(answer)
        if answer["kind"] == "failed" and self._trainer.hung_up:
            print(f"ckpt writer: the trainer has died and the save failed: {answer['error']}", file=sys.stderr)

    def _run(self, request: WriteRequest, arena: MappedArena, checksum_home: str | None) -> WriteResult:
        """Do what a request asks for; `arena` is its source."""
        keeps_cached = self._keeps_cached and CachedFiles.fit(request)
        return run_write_job(request, checksum_home, beside_training=True, keeps_cached=keeps_cached)

    def _storage_in(self, plain: Mapping[str, Any]) -> Storage:
        """The storage of a request; that of a bucket is kept, with its connections and credentials."""
        kind = [plain[name] for name in ("storage_options", "storage_home")]
        kept = self._storage
        if kept is None or kept[0] != kind or not kept[1].holds(plain["attempt"]["target"]):
            kept = (kind, storage_in(plain))
            self._storage = kept if plain["storage_home"] else None
        return kept[1]

    def _settle(self) -> None:
        """The last save was committed or given up."""
        save = self._undecided
        self._forget()
        if save is not None and self._keeps_cached:
            self._cached.replace(save.request, save.result)

    def _forget(self) -> None:
        if self._undecided is not None:
            self._undecided.lock.close()
            self._undecided = None


def _pieces(blob: memoryview, sizes: list[int]) -> list[memoryview]:
    pieces, position = [], 0
    for size in sizes:
        pieces.append(blob[position : position + size])
        position += size
    return pieces


def main() -> None:
    """Entry point of the process."""
    serve(lambda _job, trainer: _work(trainer), on_orphan="finish")


def _work(trainer: Channel) -> None:
    ByteWorker(trainer).handle_frames()
