"""`ObjectStorage`: the storage of a bucket (S3 and what speaks its protocol, GCS, Azure), by the package obstore.

A large file is a multipart upload, straight from the memory that is given; it becomes visible when it is complete. A
bucket has no renames, folders or locks: checkpoints are committed by a conditional put, an empty folder is an object in
it that `names` leaves out, and a live process touches a file.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from .bucket_store import FOLDER_MARK, ObjectFolders, bucket_of, open_store, package, patiently, typed_errors
from .storage import Held, StoredFile

if TYPE_CHECKING:
    from .bucket_set import ObjectSet

logger = logging.getLogger("ckpt_component.storage")

#: The largest object that S3 copies with one request.
_MOST_COPIED = 5 << 30
#: Least bytes of a part, and how many parts of a file are sent at a time.
_PART_BYTES, _IN_FLIGHT = 8 << 20, 6
#: S3 allows 10,000 parts.
_MOST_PARTS = 9_000
#: How long a conditional put is repeated that the store refuses because others are in progress.
_CONFLICT_SECONDS, _CONFLICT_PAUSE = 30.0, 0.1
#: How often a conditional put is repeated whose connection was cut; obstore repeats only what may be done twice.
_CUT_TRIALS = 4
#: How long a listing that fails is repeated, after obstore's own repetitions.
_LIST_SECONDS = 2.0
#: How often to remove a folder from which another process removes objects, too.
_REMOVALS = 10


@dataclass
class _OpenObject:
    """A file that is being written.

    Attributes:
        path: its path
        writer: takes its bytes, in order
        grows: whether its size was not known when it was created
        position: how many bytes it has taken
        whole: whether the store has the file
    """

    path: str
    writer: Any
    grows: bool
    position: int = 0
    whole: bool = False


class ObjectStorage(ObjectFolders):
    """The objects of one bucket.

    Args:
        path: a path in the bucket, which begins with the scheme and the bucket
        options: obstore's settings of the store (`endpoint`, `region`, `access_key_id`, `allow_http`, `timeout`, ...);
            those that are missing come from the environment. And `max_retries` of a request.
        home: the folder that obstore is imported from, for a process without site-packages
        client: what makes the requests in the place of obstore's functions, for a simulation; then `path` is what all
            paths of the bucket begin with

    Attributes:
        root: scheme and bucket

    Raises:
        CheckpointConfigError: the scheme is not one of `SCHEMES`, obstore is not installed, or an option is wrong
    """

    def __init__(
        self,
        path: str,
        *,
        options: Mapping[str, Any] | None = None,
        home: str | None = None,
        client: Any = None,
    ) -> None:
        super().__init__(atomic_rename=False, options=options, warns=False)
        self.root = path if client is not None else bucket_of(path)
        self._obstore = client if client is not None else package(self.root, home)
        self._home = home
        self._store = None if client is not None else open_store(self._obstore, self.root, self.options)
        self._uploads: dict[int, _OpenObject] = {}
        self._numbers = itertools.count(1)
        self._checked = False

    @property
    def streams(self) -> bool:
        return True

    @property
    def home(self) -> str:
        return self._home or os.path.dirname(os.path.dirname(self._obstore.__file__))

    def holds(self, path: str) -> bool:
        return f"{path}/".startswith(f"{self.root}/")

    # Folders

    def remove_tree(self, path: str) -> None:
        keys = [entry["path"] for entry in self._below(path)]
        if not keys:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        for trials_left in reversed(range(_REMOVALS)):
            try:
                with typed_errors(path):
                    self._obstore.delete(self._store, keys)
                return
            except FileNotFoundError:  # Azure and Google, of an object that another request has removed
                keys = [entry["path"] for entry in self._below(path)]
                if not keys:
                    return
                if not trials_left:
                    raise

    def names(self, path: str) -> list[str]:
        listed = patiently(partial(self._listed, path), path, _LIST_SECONDS, outside=self.outside)
        keys = [*listed["common_prefixes"], *(entry["path"] for entry in listed["objects"])]
        return sorted({os.path.basename(key) for key in keys} - {FOLDER_MARK})

    def is_folder(self, path: str) -> bool:
        return path == self.root or self._first_below(path) is not None

    # Large files

    def create(self, path: str, size: int = 0) -> int:
        if self.size(path) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        part = max(_PART_BYTES, -(-size // _MOST_PARTS))
        with typed_errors(path):
            writer = self._obstore.open_writer(
                self._store, self._key(path), buffer_size=part, max_concurrency=_IN_FLIGHT
            )
        fd = next(self._numbers)
        self._uploads[fd] = _OpenObject(path, writer, grows=not size)
        return fd

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        upload = self._uploads[fd]
        for piece in buffers:
            if offset != upload.position:
                text = f"bytes of an object go in order, and those at {upload.position} come before {offset}"
                raise OSError(errno.ESPIPE, text, upload.path)
            offset += piece.nbytes
            with typed_errors(upload.path):
                upload.writer.write(piece)  # waits while enough parts are on their way
            upload.position = offset

    def sync(self, fd: int) -> None:
        upload = self._uploads[fd]
        if upload.whole:
            return
        try:
            with typed_errors(upload.path):
                upload.writer.close()
        except OSError as error:
            # The answer may have been lost. Only this attempt writes to this path.
            with contextlib.suppress(OSError):
                upload.whole = self.size(upload.path) == upload.position
            if not upload.whole:
                raise
            logger.info("%s is complete, although its last request reported an error: %s", upload.path, error)
        upload.whole = True

    def close(self, fd: int) -> None:
        upload = self._uploads.pop(fd)
        if upload.whole:
            return
        if upload.grows and not upload.position:
            self._put(upload.path, b"")
            return
        try:
            with typed_errors(upload.path):
                upload.writer.__exit__(OSError, None, None)  # gives up the upload
        except OSError as error:
            logger.info("the parts of %s, which was given up, may stay in the bucket: %s", upload.path, error)

    def hold(self, path: str) -> Held | None:
        size = self.size(path)
        if size is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return path if size <= _MOST_COPIED else None

    def share(self, held: Held, path: str) -> bool:
        try:
            with typed_errors(str(held)):
                self._obstore.copy(self._store, self._key(str(held)), self._key(path))
        except OSError as error:
            # The answer may have been lost. Only this attempt writes to this path.
            size = self.size(path)
            if size is None or size != self.size(str(held)):
                raise
            logger.info("%s is complete, although its request reported an error: %s", path, error)
        return True

    def read_held(self, held: Held, buffer: memoryview, offset: int) -> None:
        data = self.read_range(str(held), offset, len(buffer))
        if len(data) < len(buffer):
            raise OSError(errno.EIO, "the object is too short", str(held))
        buffer[:] = data

    def open_files(self, folder: str, *, shared: bool = True) -> ObjectSet:
        from .bucket_set import ObjectSet  # processes that only write do not load it

        return ObjectSet(self, folder)

    def read_range(self, path: str, offset: int, length: int) -> memoryview:
        """Read a range of a file."""
        with typed_errors(path):
            return memoryview(self._obstore.get_range(self._store, self._key(path), start=offset, length=length))

    # Small files

    def read(self, path: str, limit: int) -> bytes:
        with typed_errors(path):
            answer = self._obstore.get(self._store, self._key(path))
            if answer.meta["size"] > limit:
                raise OSError(errno.EFBIG, f"larger than the {limit} bytes allowed for this file", path)
            return bytes(answer.bytes())

    def write_new(self, path: str, data: bytes) -> None:
        try:
            self.put_new(path, data, "")
        except FileExistsError:
            # The request was done and repeated if its answer was lost.
            if self.size(path) != len(data) or self.read(path, len(data)) != data:
                raise

    def write_over(self, path: str, data: bytes) -> None:
        self._put(path, data)

    def put_new(self, path: str, data: bytes, draft: str) -> None:
        deadline, pause = self.outside.now() + _CONFLICT_SECONDS, _CONFLICT_PAUSE
        cuts_left = _CUT_TRIALS
        while True:
            try:
                self._put(path, data, "create")
                return
            except BlockingIOError:  # other puts of this path are in progress
                if self.outside.now() > deadline:
                    raise
            except ConnectionResetError as error:
                # If the store has done it, the next put finds the name taken, and the caller compares what is there.
                cuts_left -= 1
                if cuts_left < 0 or self.outside.now() > deadline:
                    raise
                logger.info("putting %s again in %.1f s: %s", path, pause, error)
            self.outside.sleep(pause)
            pause = min(2 * pause, 1.0)

    def unlink(self, path: str) -> None:
        self._head(path)  # S3 does not say that there is none
        with contextlib.suppress(FileNotFoundError), typed_errors(path):  # the others say it of a repeated request too
            self._obstore.delete(self._store, self._key(path))

    def size(self, path: str) -> int | None:
        if path == self.root:
            return None
        try:
            return int(self._head(path)["size"])
        except FileNotFoundError:
            return None

    def sizes(self, folder: str, names: Sequence[str]) -> dict[str, int | None]:
        listed = patiently(partial(self._listed, folder), folder, _LIST_SECONDS, outside=self.outside)
        found = {os.path.basename(entry["path"]): int(entry["size"]) for entry in listed["objects"]}
        sizes = {name: found.get(name) for name in names}
        for name in names:  # a listing may lag behind; one that is missing shows that it does not
            if sizes[name] is None:
                sizes[name] = self.size(os.path.join(folder, name))
                if sizes[name] is None:
                    break
        return sizes

    def files_below(self, path: str) -> Iterator[StoredFile]:
        listed = patiently(lambda: [*self._below(path)], path, _LIST_SECONDS, outside=self.outside)
        if not listed:
            yield from super().files_below(path)
        sizes = {f"{self.root}/{entry['path']}": int(entry["size"]) for entry in listed}
        yield from (
            StoredFile(file, size, 1, file) for file, size in sizes.items() if not file.endswith(f"/{FOLDER_MARK}")
        )

    def modified(self, path: str) -> float:
        with contextlib.suppress(FileNotFoundError):
            return float(self._head(path)["last_modified"].timestamp())
        times = [entry["last_modified"].timestamp() for entry in self._below(path)]
        if not times:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return float(max(times))

    # Properties of a folder

    def try_folder(self, path: str, name: str) -> float:
        trial = os.path.join(path, name)
        self.write_new(trial, b"")
        try:
            made = self.modified(trial)
            with contextlib.suppress(FileExistsError):
                self.put_new(trial, b"", "")
                text = "the store ignores If-None-Match, so two runs could commit one step; use another store"
                raise OSError(errno.EOPNOTSUPP, text, path)
        finally:
            self.unlink(trial)
        self._checked = True
        return made

    def check_puts(self, path: str, name: str) -> None:
        if not self._checked:
            self.try_folder(path, name)

    def _key(self, path: str) -> str:
        """The name of the object at a path."""
        if not self.holds(path):
            raise OSError(errno.EXDEV, f"not in {self.root}", path)
        return path[len(self.root) + 1 :]

    def _put(self, path: str, data: bytes, mode: str = "overwrite") -> None:
        with typed_errors(path):
            self._obstore.put(self._store, self._key(path), data, mode=mode, use_multipart=False)

    def _head(self, path: str) -> Mapping[str, Any]:
        with typed_errors(path):
            return dict(self._obstore.head(self._store, self._key(path)))

    def _listed(self, path: str) -> Mapping[str, Any]:
        with typed_errors(path):
            return dict(self._obstore.list_with_delimiter(self._store, self._key(path) or None))

    def _first_below(self, path: str) -> Mapping[str, Any] | None:
        # obstore repeats a listing that is refused, but not one whose answer is cut.
        return patiently(lambda: next(self._below(path), None), path, _LIST_SECONDS, outside=self.outside)

    def _below(self, path: str) -> Iterator[Mapping[str, Any]]:
        """The objects below a folder, listed as they are asked for."""
        with typed_errors(path):
            for batch in self._obstore.list(self._store, self._key(path) or None):
                yield from batch
