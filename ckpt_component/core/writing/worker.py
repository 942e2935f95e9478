"""The background writer process: it writes staged images to files and imports no torch.

The frames of the trainer (see `framing`): `arena` passes a memfd; `table` passes the layout of a structure; `write`
requests one save and is answered by `done` or `failed`; `decided` means that the trainer committed or gave up the last
save; `close` asks the process to exit. When the trainer has died, rank 0's process first finishes a save that was
written but not decided (`orphan_commit`). A process that keeps snapshots in memory understands more (`server`).
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...errors import describe_error
from ..available_memory import is_plentiful
from ..commit.liveness import AttemptLock
from ..outside import OUTSIDE, Outside
from ..pages import map_shared
from ..processes.framing import Channel, Frame
from ..processes.serve import END, FrameRequest, Handler, answer_requests, serve
from ..storage.safe_open import forget, is_on_disk, open_regular
from ..storage.storage import Storage
from .orphan_commit import UndecidedSave
from .request import WriteRequest, WriteResult, WriteTable, storage_in
from .write_job import run_write_job

#: Bytes to read at a time, until the next look at the available memory, and per second.
_PIECE_BYTES = 4 << 20
_LOOK_BYTES = 32 << 20
_MAX_RATE = 256 << 20


class CachedFiles:
    """The files of one checkpoint that this process has written, and those that it still has to read."""

    def __init__(self) -> None:
        #: By device and inode: the checkpoint before may have the same file by another path.
        self._paths: dict[tuple[int, int], str] = {}
        self._unread: list[str] = []
        self._offset = self._size = 0
        self._fd: int | None = None
        self._needed = 0
        self._rate = float(_MAX_RATE)
        #: Seconds until the next piece is to be read; None: nothing is to be read.
        self.pause: float | None = None

    @staticmethod
    def fit(request: WriteRequest) -> bool:
        """Whether the files of a request, and of the other ranks of this host, fit well into memory."""
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        ranks = int(local) if local.isdecimal() else request.world_size
        return request.fs.has_direct_io and is_plentiful(request.source.nbytes * ranks)

    def replace(self, request: WriteRequest, result: WriteResult) -> None:
        """Drop the files of the checkpoint before, and begin to read those of a request that may be committed."""
        folder, paths = request.attempt.protocol.files_of(request.attempt), dict[tuple[int, int], str]()
        try:
            on_disk = is_on_disk(folder)
            for file in result["files"]:
                path = os.path.join(folder, file["name"])
                status = os.stat(path)
                paths[status.st_dev, status.st_ino] = path
        except OSError:  # it was given up, so the one before is still the newest
            return
        if not on_disk or not self.fit(request):
            self.drop()
            return
        read = {identity for identity, path in self._paths.items() if path not in self._unread}
        self._close()
        _drop([path for identity, path in self._paths.items() if identity not in paths])
        self._paths = paths
        self._unread = [path for identity, path in paths.items() if identity not in read][::-1]
        self._needed = request.source.nbytes
        self._rate = min(request.options.max_bytes_per_second or _MAX_RATE, _MAX_RATE)
        self.pause = 0.0 if self._unread else None

    def read_piece(self) -> None:
        """Read the next piece, and set `pause`."""
        if self.pause is None:
            return
        try:
            if self._offset % _LOOK_BYTES == 0 and not is_plentiful(self._needed):
                self.drop()
                return
            if self._fd is None:
                self._fd, self._offset = open_regular(self._unread[-1]), 0
                self._size = os.fstat(self._fd).st_size
            os.posix_fadvise(self._fd, self._offset, _PIECE_BYTES, os.POSIX_FADV_WILLNEED)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):  # deleted by `keep`
                print(f"ckpt writer: {self._unread[-1]} is not kept in the page cache: {error}", file=sys.stderr)
            self.drop()
            return
        self._offset += _PIECE_BYTES
        self.pause = min(_PIECE_BYTES / self._rate, 1.0)
        if self._offset >= self._size:
            self._close()
            self._unread.pop()
            if not self._unread:
                self.pause = None

    def drop(self) -> None:
        """Stop reading, and drop the files from the page cache."""
        self._close()
        self.pause, self._unread = None, []
        _drop([*self._paths.values()])
        self._paths = {}

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _drop(paths: Sequence[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):  # deleted since
            fd = open_regular(path)
            try:
                forget(fd)
            finally:
                os.close(fd)


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
        self._trainer.send({"kind": "ready", "pid": self._trainer.outside.pid()})
        try:
            if answer_requests(
                self._trainer, self._handlers(), self._refuse, notes=self._notes(), receive=self._next_frame
            ):
                return True
            if self._undecided is not None:
                self.outlive_trainer(self._undecided)
            return False
        finally:
            self._forget()
            while self._arenas:
                self._arenas.popitem()[1].close()

    def _handlers(self) -> dict[str, Handler]:
        """What answers the requests of the trainer, by their kind."""
        return {"write": self._write, "close": lambda _: END}

    def _notes(self) -> dict[str, Callable[[FrameRequest], None]]:
        """What is done with the frames that get no answer, by their kind."""
        return {"arena": self._map_arena, "table": self._take_table, "decided": lambda _: self._settle()}

    def outlive_trainer(self, undecided: UndecidedSave) -> None:
        """The trainer has died, and left a save that this rank has written."""
        if undecided.request.rank == 0:
            undecided.finish()

    def _refuse(self, request: FrameRequest) -> Any:
        """Report a frame of an unknown kind, and handle no others: they too may have another meaning."""
        kind = request.header["kind"]
        error = f"the trainer sent a frame of the unknown kind {kind!r}; they may be of different releases"
        print(f"ckpt writer: {error}", file=sys.stderr)
        self._trainer.send({"kind": "failed", "id": None, "error": error, "errno": None, "traceback": error})
        while (frame := self._next_frame()) is not None and frame[0]["kind"] != "close":
            for fd in frame[2]:
                os.close(fd)
        return END

    def _next_frame(self) -> Frame | None:
        """Wait for the next frame, and in the meantime read files; None if the trainer has died."""
        while True:
            pause = self._cached.pause
            try:
                return self._trainer.receive(math.inf if pause is None else self._trainer.outside.now() + pause)
            except TimeoutError:
                self._cached.read_piece()

    def _map_arena(self, request: FrameRequest) -> None:
        header, (fd,) = request.header, request.fds
        for number in header["retired"]:
            if number in self._arenas:
                self._arenas.pop(number).close()
        self._arenas[header["id"]] = MappedArena(header["id"], fd, header["size"])

    def _take_table(self, request: FrameRequest) -> None:
        header = request.header
        self._tables = {}  # free the last table before the new one takes memory
        sizes, files = header["table"]["sizes"], header["sidecars"]
        pieces = _pieces(request.blob, [*sizes, *(size for _, size in files)])
        # Copied, because views would keep the whole frame in memory.
        table = WriteTable.from_parts(header["table"], [memoryview(bytes(p)) for p in pieces[: len(sizes)]])
        sidecars = {name: zlib.compress(piece, 1) for (name, _), piece in zip(files, pieces[len(sizes) :], strict=True)}
        self._tables = {table.number: (table, sidecars, header["checksum_home"])}

    def _write(self, asked: FrameRequest) -> dict[str, Any]:
        """Write one save. A failure fails only this save. Closes the descriptors of files that the save shares."""
        self._forget()
        lock: AttemptLock | None = None
        job, trainer = asked.header, self._trainer
        until = trainer.outside.now() + job["seconds"]
        self._keeps_cached = job.get("keeps_cached", False)
        try:
            table, sidecars, checksum_home = self._tables[job["table"]]
            fs, arena = self._storage_in(job["request"]), self._arenas[job["arena"]]
            request = WriteRequest.from_parts(job["request"], fs, table, asked.blob, arena, asked.fds)
            lock = AttemptLock(request.fs, request.attempt)
            result = self._run(request, arena, checksum_home)
        except Exception as error:
            if lock is not None:
                lock.close()
            if trainer.hung_up:
                text = f"ckpt writer: the trainer has died and the save failed: {describe_error(error)}"
                print(text, file=sys.stderr)
            raise
        finally:
            for fd in asked.fds:
                os.close(fd)
        self._undecided = UndecidedSave(request, result, sidecars, lock, until)
        return {"result": result}

    def _run(self, request: WriteRequest, arena: MappedArena, checksum_home: str | None) -> WriteResult:
        """Do what a request asks for; `arena` is its source."""
        keeps_cached = self._keeps_cached and CachedFiles.fit(request)
        return run_write_job(request, checksum_home, beside_training=True, keeps_cached=keeps_cached)

    def _storage_in(self, plain: Mapping[str, Any]) -> Storage:
        """The storage of a request; that of a bucket is kept, with its connections and credentials."""
        kind = [plain[name] for name in ("storage_options", "storage_home")]
        kept = self._storage
        if kept is None or kept[0] != kind or not kept[1].holds(plain["attempt"]["target"]):
            storage = storage_in(plain, self._trainer.outside)
            kept = (kind, storage)
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


def main(outside: Outside = OUTSIDE) -> None:
    """Entry point of the process."""
    serve(lambda _job, trainer: _work(trainer), on_orphan="finish", outside=outside)


def _work(trainer: Channel) -> None:
    ByteWorker(trainer).handle_frames()
