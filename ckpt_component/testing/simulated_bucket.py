"""`SimulatedBucket`: a bucket in memory behind `ObjectStorage`, whose requests fail where a test says.

What each layer must survive, as the stores themselves promise no more:

- a put is whole or not there, and durable once it is answered; an object that is written in parts is not there before
  its last request. A power cut or a kill of the client loses only parts;
- a conditional put (`mode="create"`) is done for one client at most. One that is repeated because its answer was lost
  finds its own object there, and is refused: `twice`;
- an answer may be lost after the request was done: `lost`;
- a listing comes in pages, and some stores list what was so a few changes ago: `lag`. Reads of one object do not lag;
- a removal of what is not there is no error.

A request is repeated after a pause, which passes here at once: the clock of the storage is ahead by the pauses.
"""

from __future__ import annotations

import datetime
import errno
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from ..core.outside import Outside
from ..core.storage.bucket import ObjectStorage
from .disk import DiskFile
from .simulated_files import Fault, PowerCut

T = TypeVar("T")
_Entries = list[dict[str, Any]]

#: Entries of a page of a listing; small, so that tests have several.
_PAGE = 3


@dataclass
class SimulatedObjects:
    """What the store holds, which outlives its clients.

    Attributes:
        objects: by path
        now: its clock, seconds since 1970; each change takes a millisecond
        lag: how many changes a listing may lag behind
        lag_seconds: for how long after a change a listing may not know of it
    """

    objects: dict[str, DiskFile] = field(default_factory=dict)
    now: float = 1.8e9
    lag: int = 0
    lag_seconds: float = math.inf
    #: The last changes: when, and the names before.
    _changes: deque[tuple[float, tuple[str, ...]]] = field(default_factory=lambda: deque(maxlen=100))

    def file(self, path: str) -> DiskFile:
        """The object at a path. Raises FileNotFoundError."""
        if path not in self.objects:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self.objects[path]

    def walk(self, folder: str) -> Iterator[str]:
        """The paths below a folder."""
        return (path for path in sorted(self.objects) if path.startswith(f"{folder}/"))

    def put(self, path: str, data: bytes, *, new: bool = False) -> None:
        """Put an object. Raises FileExistsError if `new` and it is there."""
        if new and path in self.objects:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self._change()
        self.objects[path] = DiskFile(bytearray(data), modified=self.now)

    def remove(self, path: str) -> None:
        """Remove an object, if it is there."""
        if path in self.objects:
            self._change()
            del self.objects[path]

    def listed(self, prefix: str) -> list[str]:
        """The paths with a prefix, as many changes ago as `lag` says, of those that can still be looked at."""
        unknown = [names for when, names in self._changes if self.now - when <= self.lag_seconds][-self.lag :]
        names = unknown[0] if self.lag and unknown else sorted(self.objects)
        return [path for path in names if path.startswith(prefix) and path in self.objects]

    def cut_power(self, seed: int) -> None:
        """The clients are gone; what was answered stays. `seed` chooses nothing: there is one state."""

    def _change(self) -> None:
        self.now += 0.001
        self._changes.append((self.now, tuple(sorted(self.objects))))


class SimulatedBucket(ObjectStorage):
    """A client of a bucket, for `build_manager(..., storage_of=lambda path: storage)` with the caller `inline`.

    Args:
        bucket: the bucket, whose paths are like those of files: `/runs/one`
        faults: what happens at the requests with these numbers, from 1 on. `cut`, `fail` and `lost` as for files;
            `twice`: it is done twice, and the second answer counts
        counts: whether the requests at a path have numbers; None: at every path
        requests: what makes the requests, instead of what these two describe

    Attributes:
        disk: the bucket
        requests: what makes the requests
        operations: `(name, path)` of each request that has a number, in their order
    """

    def __init__(
        self,
        bucket: SimulatedObjects,
        faults: Mapping[int, Fault] | None = None,
        *,
        counts: Callable[[str], bool] | None = None,
        requests: BucketRequests | None = None,
    ) -> None:
        self.disk = bucket
        if requests is None:
            requests = BucketRequests(bucket, {} if faults is None else faults, counts or (lambda path: True))
        self.requests, self.operations = requests, requests.operations
        super().__init__("", client=requests)
        self.outside = _AheadOutside()


class _AheadOutside(Outside):
    """A clock on which pauses take no time."""

    def __init__(self) -> None:
        self._ahead = 0.0
        self.now = lambda: Outside.now() + self._ahead
        self.sleep = self._skip

    def _skip(self, seconds: float) -> None:
        self._ahead += seconds


class BucketRequests:
    """The functions of obstore that `ObjectStorage` calls, on simulated objects."""

    def __init__(self, bucket: SimulatedObjects, faults: Mapping[int, Fault], counts: Callable[[str], bool]) -> None:
        self.bucket = bucket
        self.operations: list[tuple[str, str]] = []
        self._faults = faults
        self._counts = counts
        self._lasting: Fault | None = None
        self._is_off = False
        self._lock = threading.Lock()

    def request(self, name: str, path: str, effect: Callable[[], T]) -> T:
        """Make a request, or what its fault says."""
        with self._lock:
            return self._made(name, path, effect)

    def _made(self, name: str, path: str, effect: Callable[[], T]) -> T:
        if self._is_off:
            raise PowerCut
        fault: Fault | None = None
        if self._counts(path):
            self.operations.append((name, path))
            fault = self._faults.get(len(self.operations), self._lasting)
        if fault is None:
            return effect()
        if fault.lasts:
            self._lasting = fault
        if fault.kind == "cut":
            self._is_off = True
            raise PowerCut
        if fault.kind == "fail":
            raise OSError(fault.code, os.strerror(fault.code), path)
        done = effect()
        if fault.kind == "lost":
            raise OSError(errno.ECONNRESET, os.strerror(errno.ECONNRESET), path)
        return effect() if fault.kind == "twice" else done

    def put(self, store: None, key: str, data: bytes, *, mode: str, use_multipart: bool) -> None:
        path = f"/{key}"
        self.request("put", path, partial(self.bucket.put, path, bytes(data), new=mode == "create"))

    def copy(self, store: None, from_: str, to: str) -> None:
        self.request("copy", f"/{to}", lambda: self.bucket.put(f"/{to}", bytes(self.bucket.file(f"/{from_}").data)))

    def delete(self, store: None, keys: str | Sequence[str]) -> None:
        for key in [keys] if isinstance(keys, str) else keys:
            self.request("delete", f"/{key}", partial(self.bucket.remove, f"/{key}"))

    def head(self, store: None, key: str) -> dict[str, Any]:
        return self.request("head", f"/{key}", lambda: self._entry(f"/{key}"))

    def get(self, store: None, key: str) -> _Fetched:
        return self.request("get", f"/{key}", lambda: _Fetched(bytes(self.bucket.file(f"/{key}").data)))

    def get_range(self, store: None, key: str, *, start: int, length: int) -> bytes:
        path = f"/{key}"
        return self.request("get", path, lambda: bytes(self.bucket.file(path).data[start : start + length]))

    def list(self, store: None, prefix: str | None) -> Iterator[_Entries]:
        folder, last = f"/{prefix or ''}".rstrip("/"), ""
        while entries := self.request("list", folder, partial(self._page, folder, last)):
            yield entries
            last = f"/{entries[-1]['path']}"

    def list_with_delimiter(self, store: None, prefix: str | None) -> dict[str, Any]:
        folder = f"/{prefix or ''}".rstrip("/")

        def effect() -> dict[str, Any]:
            paths = self.bucket.listed(f"{folder}/")
            parts = {path: path[len(folder) + 1 :].partition("/") for path in paths}
            folders = {f"{folder[1:]}/{name}" for name, slash, _ in parts.values() if slash}
            here = [self._entry(path) for path, (_, slash, _) in parts.items() if not slash]
            return {"common_prefixes": sorted(folders), "objects": here}

        return self.request("list", folder, effect)

    def open_writer(self, store: None, key: str, *, buffer_size: int, max_concurrency: int) -> _PartsWriter:
        return _PartsWriter(self, self.bucket, f"/{key}")

    def _page(self, folder: str, last: str) -> _Entries:
        """The entries after a path; other changes may come between two pages."""
        paths = [path for path in self.bucket.listed(f"{folder}/") if path > last]
        return [self._entry(path) for path in paths[:_PAGE]]

    def _entry(self, path: str) -> dict[str, Any]:
        file = self.bucket.file(path)
        modified = datetime.datetime.fromtimestamp(file.modified, tz=datetime.timezone.utc)
        return {"path": path[1:], "size": file.size, "last_modified": modified}


class _Fetched:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.meta = {"size": len(data)}

    def bytes(self) -> bytes:
        return self._data


class _PartsWriter:
    """An object that is written in parts: each write sends one, and the last request makes it visible."""

    def __init__(self, requests: BucketRequests, bucket: SimulatedObjects, path: str) -> None:
        self._requests, self._bucket, self._path = requests, bucket, path
        self._parts: dict[int, bytes] = {}

    def write(self, piece: memoryview) -> None:
        # Parts have numbers: one that is sent twice replaces itself.
        part = {len(self._parts): bytes(piece)}
        self._requests.request("part", self._path, partial(self._parts.update, part))

    def close(self) -> None:
        data = b"".join(self._parts.values())
        self._requests.request("complete", self._path, partial(self._bucket.put, self._path, data))

    def __exit__(self, *_: object) -> None:
        self._parts.clear()
