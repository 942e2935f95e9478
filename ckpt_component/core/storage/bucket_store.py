"""Reach a bucket: open it with its credentials, by obstore, imported here alone; know its errors and what to repeat."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, TypeVar

from ...errors import CheckpointConfigError
from ..outside import OUTSIDE, Outside
from .storage import Storage

logger = logging.getLogger("ckpt_component.storage")
_Result = TypeVar("_Result")

#: How long a request that fails is repeated, after a first pause that doubles; obstore repeats some by itself.
_PATIENCE, _PAUSE, _LONGEST_PAUSE = 60.0, 0.1, 5.0
#: What no repetition changes.
_FINAL = frozenset({errno.ENOENT, errno.EACCES, errno.EINVAL, errno.EXDEV, errno.EOPNOTSUPP})

#: Types of others that obstore raises too, those of OSError without an errno.
_BUILT_IN = (OSError, ValueError, NotImplementedError)
_ERRNO_OF_STATUS = {401: errno.EACCES, 403: errno.EACCES, 404: errno.ENOENT, 507: errno.ENOSPC}
_ERRNO_OF_TYPE = {
    "FileNotFoundError": errno.ENOENT,
    "AlreadyExistsError": errno.EEXIST,  # HTTP 412: a put with If-None-Match, and the name is taken
    "PermissionDeniedError": errno.EACCES,
    "UnauthenticatedError": errno.EACCES,
    "NotSupportedError": errno.EOPNOTSUPP,
    "NotImplementedError": errno.EOPNOTSUPP,
    "ValueError": errno.EINVAL,
}
#: In the text of an error that has no other type: what it means.
_ERRNO_OF_TEXT = {
    "<Code>InvalidBucketName": errno.EINVAL,
    "<Code>InvalidResourceName": errno.EINVAL,
    "kind: Timeout": errno.ETIMEDOUT,
    "timed out": errno.ETIMEDOUT,
    "kind: Interrupted": errno.ECONNRESET,  # before or after the store has seen the request
    "kind: Connect": errno.ECONNREFUSED,
    "error sending request": errno.ECONNRESET,
}
_STATUS = re.compile(r"status code: (\d{3})")
_BODY = re.compile(r": <\?xml.*", re.S)
_CODE_AND_MESSAGE = re.compile(r"<Code>(.*?)</Code>\s*<Message>(.*?)</Message>", re.S)


@contextlib.contextmanager
def typed_errors(path: str) -> Iterator[None]:
    """Turn the errors of obstore into OSError. They are not kept as the cause: they repeat whole requests."""
    try:
        yield
    except Exception as error:
        of_package = type(error).__module__.startswith("obstore")
        if not of_package and (not isinstance(error, _BUILT_IN) or getattr(error, "errno", None) is not None):
            raise
        text = str(error)
        status = _STATUS.search(text)
        code = _ERRNO_OF_TYPE.get(type(error).__name__) or _ERRNO_OF_STATUS.get(int(status[1]) if status else 0)
        if code is None:
            code = next((code for sign, code in _ERRNO_OF_TEXT.items() if sign in text), errno.EIO)
        if status is not None and status[1] == "409" and "AlreadyExists<" not in text:
            code = errno.EAGAIN  # S3, of simultaneous puts; Azure says it of a name that is taken
        raise OSError(code, text_of(error), path) from None


def text_of(error: Exception) -> str:
    """The answer of the store, without its request and without a query, which may have a signature."""
    text = str(error).partition("\n\nDebug source")[0].rpartition("Server returned non-2xx status code: ")[2]
    answer = _CODE_AND_MESSAGE.search(text)
    # Azure's message has the request's number and time on lines of their own.
    text = _BODY.sub("" if answer is None else f": {answer[1]}: {answer[2].partition(chr(10))[0].strip()}", text)
    return re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", text)[:500]


#: Schemes of buckets: the class of their store, and the prefix of its environment variables. `memory://name` is a
#: store of this process, for tests.
SCHEMES = {"s3": ("S3Store", "AWS"), "gs": ("GCSStore", "GOOGLE"), "az": ("AzureStore", "AZURE"), "memory": ("", "")}
#: The time for a request; enough for twelve parts at a time at 1 MB/s.
_TIMEOUT = "120s"


def bucket_of(path: str) -> str:
    """The scheme and the bucket of a path. Raises CheckpointConfigError if the scheme is not one of `SCHEMES`."""
    scheme, _, rest = path.partition("://")
    bucket = rest.partition("/")[0]
    if scheme not in SCHEMES or not bucket:
        schemes = ", ".join(f"{each}://" for each in SCHEMES)
        raise CheckpointConfigError(f"{path} is not in a bucket; checkpoints are in folders, or below {schemes}.")
    return f"{scheme}://{bucket}"


def open_store(obstore: Any, root: str, options: Mapping[str, Any]) -> Any:
    """The store of a bucket; what `options` do not set comes from the environment.

    Raises:
        CheckpointConfigError: an option, or what the environment says, is wrong
    """
    scheme, _, bucket = root.partition("://")
    kind, environment = SCHEMES[scheme]
    if not kind:
        return _memory_store(bucket)
    config = {name: _value(name, value) for name, value in options.items()}
    try:
        retries = {"max_retries": int(config.pop("max_retries"))} if "max_retries" in config else None
        if f"{environment}_TIMEOUT" not in os.environ:
            config.setdefault("timeout", _TIMEOUT)
        return getattr(obstore.store, kind)(bucket, config=config, retry_config=retries)
    except Exception as error:
        raise CheckpointConfigError(
            f"{root} cannot be opened, by checkpoint.storage.options and the environment: {text_of(error)}"
        ) from None


def package(root: str, home: str | None) -> Any:
    """Import obstore, from `home` if it is given."""
    if home is not None:
        sys.path.append(home)  # last in the search order, and only during the import
    try:
        return import_module("obstore")
    except ImportError as error:
        if error.name != "obstore":
            raise
        raise CheckpointConfigError(f"{root} needs obstore: pip install 'ckpt_component[cloud]'") from None
    finally:
        if home is not None:
            sys.path.remove(home)


def _value(name: str, value: Any) -> Any:
    """An option as obstore takes it: numbers are text, those of a timeout are seconds."""
    if isinstance(value, bool):
        return value
    return f"{round(1000 * value)}ms" if name.endswith("timeout") and isinstance(value, (int, float)) else str(value)


@functools.cache  # of the process, as its name says
def _memory_store(name: str) -> Any:
    return import_module("obstore.store").MemoryStore()


def patiently(
    call: Callable[[], _Result], path: str, seconds: float | None = None, *, outside: Outside = OUTSIDE
) -> _Result:
    """Call a function that makes a request, and again after a pause if it fails as requests may.

    Args:
        call: the function
        path: what it is about, for the log
        seconds: how long it is called again, counted from its first call; None: a minute
        outside: what the pauses go by

    Raises:
        OSError: it failed for too long, or in a way that no repetition changes
    """
    deadline, pause = outside.now() + (_PATIENCE if seconds is None else seconds), _PAUSE
    while True:
        try:
            return call()
        except OSError as error:
            if error.errno in _FINAL or outside.now() + pause > deadline:
                raise
            logger.info("reading %s again in %.1f s: %s", path, pause, error)
        outside.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


#: Makes an empty folder exist; `names` leaves it out.
FOLDER_MARK = ".ckpt-folder"
_MOST_REWRITTEN = 1 << 30


class ObjectFolders(Storage):
    """A storage of whole objects by name, without renames, folders or locks; what buckets and memory have in common."""

    def make_folders(self, path: str) -> None:
        if not self.is_folder(path):
            with contextlib.suppress(FileExistsError):  # another rank or run created it concurrently
                self.make_folder(path)

    def make_folder(self, path: str) -> None:
        if self.is_folder(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self.write_new(os.path.join(path, FOLDER_MARK), b"")

    def remove_folder(self, path: str) -> None:
        if self.names(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self.unlink(os.path.join(path, FOLDER_MARK))

    def exists(self, path: str) -> bool:
        return self.size(path) is not None or self.is_folder(path)

    def is_real_folder(self, path: str) -> bool:
        return self.is_folder(path)

    def append(self, path: str, data: bytes) -> None:
        try:
            before = self.read(path, _MOST_REWRITTEN)
        except FileNotFoundError:
            before = b""
        self.write_over(path, before + data)

    def touch(self, path: str) -> None:
        self.write_over(path, self.read(path, _MOST_REWRITTEN))

    def changed(self, path: str) -> float:
        return self.modified(path)
