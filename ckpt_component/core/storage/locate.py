"""Which storage a path is in: files, the objects of a bucket, or what a scheme of `SCHEMES` names."""

from __future__ import annotations

import importlib
import os
import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from ...errors import CheckpointConfigError, CheckpointTypeError
from ..outside import OUTSIDE, Outside
from .files import FAILPOINT, FAILPOINT_LOG, FileStorage
from .storage import Storage

#: Begins the paths in the memory of processes of this host.
MEMORY = "host://"
#: The storages with a scheme of their own, by the module and the class that is called without arguments. Like the
#: program of a process, each is named and not imported: it is in a layer above those who ask for it.
SCHEMES = {MEMORY: ("ckpt_component.hosts.host_memory", "HostMemory")}
#: The folder of their sockets, by whose files `may_have_memory` knows whether there may be any.
MEMORY_FOLDER = "CKPT_RUNTIME_DIR"
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.I)


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path begins with a scheme, such as `s3://`."""
    return _SCHEME.match(os.fspath(path)) is not None


def memory_folder(outside: Outside = OUTSIDE) -> str:
    """The folder of the sockets of processes with memory, as it is given, which need be neither safe nor there."""
    return outside.environment.get(MEMORY_FOLDER) or f"/tmp/ckpt-{os.getuid()}"


def may_have_memory(outside: Outside = OUTSIDE) -> bool:
    """Whether processes of this host may have memory with paths: False only where none has ever had any.

    Args:
        outside: of this process
    """
    folder = memory_folder(outside)
    try:
        return not os.path.isabs(folder) or bool(os.listdir(folder))
    except FileNotFoundError:
        return False
    except OSError:  # who looks for them says what is wrong
        return True


def path_text(path: object, argument: str = "path") -> str:
    """A path that a user has passed, as text.

    Raises:
        CheckpointTypeError: it is not a path; the text names the argument
    """
    if not isinstance(path, (str, os.PathLike)):
        raise CheckpointTypeError(f"{argument} is {path!r:.100}, not a path such as {argument}='runs/one'.")
    return os.fspath(path)


def absolute(path: str | os.PathLike[str]) -> str:
    """The absolute path of a file or folder, without `~`; of a URL, the same without needless slashes."""
    text = os.fspath(path)
    scheme = _SCHEME.match(text)
    if scheme is None:
        return os.path.abspath(os.path.expanduser(text))
    bucket, slash, prefix = text[scheme.end() :].partition("/")
    prefix = posixpath.normpath(f"/{prefix}").strip("/") if slash else ""
    return scheme[0].lower() + "/".join(filter(None, (bucket, prefix)))


def expanded(path: str | os.PathLike[str], name: str) -> str:
    """Expand `~` and environment variables in a path.

    Args:
        path: as the user wrote it
        name: its key or option, for errors

    Raises:
        CheckpointConfigError: a variable is not set, or a user has no home folder
    """
    text = os.fspath(path)

    def value_of(match: re.Match[str]) -> str:
        variable = match[1] or match[2]
        if not os.environ.get(variable):
            raise CheckpointConfigError(
                f"{name}={text}: the environment variable {variable} is not set; set it, or write the folder out."
            )
        return os.environ[variable]

    # `~` first: the value of a variable is used unchanged.
    home = os.path.expanduser(text)
    if home.startswith("~") and home == text:
        raise CheckpointConfigError(
            f"{name}={text}: there is no home folder of {text.partition('/')[0][1:] or 'this user'}; write the folder "
            f"out, or for a folder of that name {name}=./{text}"
        )
    return _VARIABLE.sub(value_of, home)


def storage_at(
    path: str | os.PathLike[str],
    *,
    durable: bool = True,
    atomic_rename: bool = True,
    options: Mapping[str, Any] | None = None,
    home: str | None = None,
    process: str = "trainer",
) -> Storage:
    """The storage of a path.

    Args:
        path: a folder or file, or a URL; other paths of the same file system or bucket may be used with the result
        durable: see `Storage`
        atomic_rename: see `Storage`; buckets never have it
        options: `checkpoint.storage.options`, for a URL
        home: the folder that the package for a URL is imported from, in a process without site-packages
        process: name of this process, which `process=` of a failpoint matches

    Raises:
        CheckpointConfigError: the scheme is not supported, the package for it is not installed, or an option is wrong
        FailpointError: the environment variables are set but invalid
    """
    scheme = _SCHEME.match(os.fspath(path))
    if scheme is not None and scheme[0] in SCHEMES:
        module, name = SCHEMES[scheme[0]]
        return cast(Storage, getattr(importlib.import_module(module), name)())
    if is_url(path):
        from .bucket import ObjectStorage  # 5 ms that runs without buckets need not wait

        return ObjectStorage(absolute(path), options=options, home=home)
    return file_storage(durable=durable, atomic_rename=atomic_rename, process=process)


def file_storage(*, durable: bool = True, atomic_rename: bool = True, process: str = "trainer") -> FileStorage:
    """The storage of files; arguments and errors as for `storage_at`."""
    if not (os.environ.get(FAILPOINT) or os.environ.get(FAILPOINT_LOG)):
        return FileStorage(durable=durable, atomic_rename=atomic_rename, warns=process == "trainer")
    from .failpoint_fs import FailpointFs  # only tests set these variables; production never imports it

    return FailpointFs(durable=durable, atomic_rename=atomic_rename, process=process)


class Storages:
    """The storages of paths, each made once; thread-safe. Arguments as for `storage_at`, and what they run in."""

    def __init__(
        self,
        *,
        durable: bool = True,
        atomic_rename: bool = True,
        options: Mapping[str, Any] | None = None,
        outside: Outside = OUTSIDE,
    ) -> None:
        self._settings: dict[str, Any] = {"durable": durable, "atomic_rename": atomic_rename, "options": options}
        self._made: dict[str, Storage] = {}
        self._outside = outside
        self._lock = outside.lock()

    def of(self, path: str) -> Storage:
        """The storage of an absolute path. Raises the errors of `storage_at`."""
        if self._outside.storage_of is not None:
            return cast(Storage, self._outside.storage_of(path))
        root = "/".join(path.split("/", 3)[:3]) if is_url(path) else ""
        with self._lock:
            if root not in self._made:
                self._made[root] = storage_at(path, **self._settings)
                self._made[root].outside = self._outside
            return self._made[root]


def folder_id(path: str | os.PathLike[str]) -> str:
    """A text that all spellings of a folder have in common, and no other folder has while this one exists.

    Args:
        path: of a folder or file, which need not exist; or a URL
    """
    return absolute(path) if is_url(path) else _id_of(_real(path))


def same_folder(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Whether two paths are one folder."""
    return absolute(one) == absolute(other) or folder_id(one) == folder_id(other)


def below(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> str | None:
    """Where a path is in a folder.

    Returns:
        The rest of the path, with slashes; empty: it is the folder; None: it is not in it.
    """
    wanted, rest = folder_id(folder), list[str]()
    for above in with_those_above(path):
        if folder_id(above) == wanted:
            return "/".join(reversed(rest))
        rest.append(os.path.basename(above))
    return None


def with_those_above(path: str | os.PathLike[str]) -> Iterator[str]:
    """A path without links, then the folders that it is in, up to the root of the files, or the bucket."""
    place, in_bucket = (absolute(path), True) if is_url(path) else (_real(path), False)
    while True:
        yield place
        above = os.path.dirname(place)
        if above == place or (in_bucket and not is_url(above)):
            return
        place = above


def _real(path: str | os.PathLike[str]) -> str:
    # `..` is the folder above in the text, as everywhere else; a link before it is not followed.
    return os.path.realpath(absolute(path))


def _id_of(place: str) -> str:
    """See `folder_id`, of a path without links."""
    rest = ""
    while True:
        try:
            status = os.stat(place)
        except OSError:  # it is not there, or cannot be looked at: then the folder above and the name are all there is
            place, name = os.path.split(place)
            rest = f"/{name}{rest}"
            continue
        return f"{status.st_dev:x}:{status.st_ino:x}{rest}"
