"""`Receiver`: brings a folder to the versions of a source, once or as they come."""

from __future__ import annotations

import logging
import math
import mmap
import os
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from ..core.commit.manifest import checkpoint_around
from ..core.progress import Progress, no_progress
from ..core.storage.files import FileStorage
from ..core.storage.locate import absolute, file_storage, is_url, path_text, same_folder, storage_at
from ..core.storage.safe_open import open_regular
from ..core.storage.storage import Storage
from ..errors import (
    CheckpointConfigError,
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointStorageFullError,
    CheckpointTimeoutError,
    CheckpointUnreadableError,
)
from ..formats import open_index
from .local_copy import STATE, LocalCopy, Pulled, read_state
from .versions import Version, Versions, chain_to

if TYPE_CHECKING:
    import numpy as np
    import torch

#: Dtypes that numpy does not have -> those of the same width in which their bits are shown.
_AS_BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


@dataclass(frozen=True)
class Weights:
    """A version of published weights, which `follow` yields.

    Attributes:
        version: number of the version
        step: training step of the checkpoint; None: unknown
        path: a Hugging Face folder on this host, for `from_pretrained` and for engines that load from disk. It has this
            version until the next one is asked for.
        changed: names of the tensors that differ from the version that was yielded before; None: all may
        nbytes: bytes that were read from the source
        lag: seconds from the commit of the checkpoint until it was here; None: unknown, or it was here before
    """

    version: int
    step: int | None
    path: str
    changed: frozenset[str] | None
    nbytes: int
    lag: float | None

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """The weights as numpy arrays that view the files; what is written into one changes no file.

        numpy has neither bfloat16 nor float8: these are their bits, as uint16 and uint8.

        Raises:
            CheckpointNotFoundError: the folder has another version by now
        """
        import numpy as np

        for view in self._views():
            dtype = np.dtype(_AS_BITS.get(view.dtype, view.dtype))
            yield view.name, np.ndarray(view.shape, dtype, view.file, view.offset)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights as tensors on the CPU, as `load_weights` of vLLM and SGLang takes them.

        They view the files; what is written into one changes no file.

        Raises:
            CheckpointNotFoundError: the folder has another version by now
        """
        import torch

        for view in self._views():
            dtype = getattr(torch, view.dtype)
            if 0 in view.shape:
                tensor = torch.empty(view.shape, dtype=dtype, device="cpu")
            else:
                count = view.nbytes // dtype.itemsize
                tensor = torch.frombuffer(view.file, dtype=dtype, count=count, offset=view.offset).view(view.shape)
            yield view.name, tensor

    def _views(self) -> Iterator[_MappedTensor]:
        contents = open_index(file_storage(), self.path).contents
        places = {name: contents.ranges_at(entry.place)[0] for name, entry in contents.tensors.items()}
        files = {name: _mapped(os.path.join(self.path, name)) for name in {place.file for place in places.values()}}
        # Each file was opened by its path: all of them are of one version if the folder is still at it.
        state = read_state(file_storage(), self.path)
        if state is None or state.version != self.version:
            there = "no version" if state is None else f"version {state.version}"
            raise CheckpointNotFoundError(
                f"{self.path} has {there} by now, not {self.version}; use what follow() yielded last."
            )
        seen = set()
        for name, entry in contents.tensors.items():
            if entry.place not in seen:  # another name of a tensor that is tied is not in the files
                seen.add(entry.place)
                place = places[name]
                yield _MappedTensor(name, entry.dtype, entry.shape, entry.nbytes, files[place.file], place.offset)


class _MappedTensor(NamedTuple):
    """A tensor in a mapped file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: mmap.mmap
    offset: int


def _mapped(path: str) -> mmap.mmap:
    fd = open_regular(path)
    try:
        return mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)


logger = logging.getLogger(__name__)
Self = TypeVar("Self", bound="Receiver")

#: How often to look again when versions were deleted while they were read.
_LOOKS = 4
#: Seconds between two looks, and at most after errors of the source.
_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


class Receiver:
    """Brings a folder to the versions of a source. A context manager: the folder belongs to it inside.

    It never writes to the source, and needs the right to read there alone.

    Args:
        source: folder or URL of the versions
        folder: the local folder; it is made if there is none
        options: options of the bucket, for a URL
        replace: take a folder over that comes from another source
        durable: whether the folder is to survive a power cut
        progress: follows the bytes
        storage_of: returns the storage of an absolute path or URL, of the folder that of files; None: files, and
            buckets by their scheme

    Raises:
        CheckpointConfigError: a package is missing, an option is wrong, or the folder is none that can be exchanged
        CheckpointExistsError: the folder has something else, or comes from another source
        CheckpointInUseError: another process brings the folder to versions
    """

    def __init__(
        self,
        source: str,
        folder: str,
        *,
        options: Mapping[str, Any] | None = None,
        replace: bool = False,
        durable: bool = True,
        progress: Progress = no_progress,
        storage_of: Callable[[str], Storage] | None = None,
    ) -> None:
        if is_url(folder):
            raise CheckpointConfigError(f"{folder} is in a bucket; versions are pulled to a folder of this host.")
        self.source, self.folder = absolute(source), absolute(folder)
        storage_of = storage_of or partial(storage_at, durable=durable, options=options, process="pull")
        self._storage = storage_of(self.source)
        self._versions = Versions(self._storage, self.source)
        self._fs = cast(FileStorage, storage_of(self.folder))
        self._progress = progress
        self._copy = LocalCopy(self._fs, self.folder)
        self._refuse_other(replace)

    def _refuse_other(self, replace: bool) -> None:
        """Refuse a folder that did not come from this source, or is the source."""
        state, fs, folder = self._copy.state, self._fs, self.folder
        if same_folder(folder, self.source):
            raise CheckpointConfigError(f"{folder} is the folder of the versions itself; name another folder.")
        around = checkpoint_around(fs, folder)
        if around is not None:
            raise CheckpointConfigError(f"{folder} is in {around}, a version or a checkpoint; name another folder.")
        if state is None:
            names = fs.names(folder) if fs.is_folder(folder) else [""] * fs.exists(folder)
            if names and STATE not in names:
                raise CheckpointExistsError(
                    f"{folder} exists and has no version that was pulled; name a new or empty folder."
                )
        elif not replace and not same_folder(state.source, self.source) and self._have(self._versions.look()) is None:
            raise CheckpointExistsError(
                f"{folder} has version {state.version} of {state.source}, not of {self.source}; name another folder, "
                "or type --replace."
            )

    @property
    def version(self) -> int | None:
        """Number of the version that the folder has; None: none."""
        return self._copy.version

    def pull(self, number: int | None = None, wait: float = 0.0) -> Pulled:
        """Bring the folder to a version.

        Args:
            number: its number; None: the newest
            wait: seconds to wait for it if it is not there yet

        Returns:
            What was done; nothing was read if the folder had the version.

        Raises:
            CheckpointNotFoundError: there is no such version, or what it is based on is gone
            CheckpointCorruptError: a version is damaged; CheckpointUnreadableError: it cannot be read
            CheckpointSaveError: the folder cannot be written; CheckpointStorageFullError: it is full
            OSError: the source cannot be listed
        """
        outside = self._fs.outside
        deadline = outside.now() + wait
        while True:
            try:
                versions = self._versions.look()
                return self._bring_to(self._chosen(versions, number), versions)
            except CheckpointNotFoundError:
                left = deadline - outside.now()
                if left <= 0:
                    raise
            outside.sleep(min(_PAUSE, left))

    def follow(self, poll_seconds: float = _PAUSE, timeout: float | None = None) -> Generator[Pulled, None, None]:
        """Bring the folder to the newest version again and again, until the iterator is closed.

        The first one is yielded even if the folder has it already. What fails at the source, or for want of space, is
        logged once, and tried again after longer and longer pauses; a damaged version is tried once, and then a newer
        one has to come.

        Args:
            poll_seconds: seconds between two looks at the source
            timeout: seconds to wait for a version; None: as long as it takes

        Raises:
            CheckpointTimeoutError: no version came in time
            CheckpointSaveError: the folder cannot be written
        """
        outside, pause, said, damaged = self._fs.outside, poll_seconds, "", ""
        waits_since, is_first = outside.now(), True
        while True:
            pulled, token = None, ""
            try:
                versions = self._versions.look()
                newest = self._chosen(versions, None)
                token = str(newest.manifest["attempt"])
                if token != damaged:
                    pulled = self._bring_to(newest, versions)
                    said = ""
                pause = poll_seconds
            except (OSError, CheckpointCorruptError, CheckpointStorageFullError) as error:
                if isinstance(error, CheckpointCorruptError) and not isinstance(error, CheckpointUnreadableError):
                    damaged = token
                elif not isinstance(error, CheckpointNotFoundError):  # then the source has answered
                    pause = min(2 * pause, max(_LONGEST_PAUSE, poll_seconds))
                if str(error) != said:
                    said = str(error)
                    logger.warning("%s %s stays at %s until that is over.", said, self.folder, self._at)
            if pulled is not None and (is_first or pulled.nbytes):
                yield pulled
                waits_since, is_first = outside.now(), False
                continue
            left = math.inf if timeout is None else waits_since + timeout - outside.now()
            if left <= 0:
                raise CheckpointTimeoutError(
                    f"No version came to {self.source} within {timeout:g} s (timeout); {self.folder} stays at "
                    f"{self._at}."
                )
            outside.sleep(min(pause, left))

    @property
    def _at(self) -> str:
        return "no version" if self.version is None else f"version {self.version}"

    def _chosen(self, versions: Mapping[int, Version], number: int | None) -> Version:
        """One of the versions, by its number; None: the newest.

        Raises:
            CheckpointNotFoundError: it is not there
            CheckpointUnreadableError: it cannot be read now, and an older one would be a step back
        """
        unreadable = self._versions.unreadable
        if unreadable and max(unreadable) > max(versions, default=0) and number in (None, max(unreadable)):
            raise CheckpointUnreadableError(f"Version {max(unreadable)} cannot be read: {unreadable[max(unreadable)]}.")
        if not versions:
            raise CheckpointNotFoundError(f"{self.source} has no version of weights yet.")
        if number is not None and number not in versions:
            raise CheckpointNotFoundError(
                f"{self.source} has no version {number}; it has {min(versions)} to {max(versions)} (ckpt ls)."
            )
        return versions[max(versions) if number is None else number]

    def _bring_to(self, target: Version, versions: Mapping[int, Version]) -> Pulled:
        """Bring the folder to one of the versions. Errors as for `pull`."""
        for looks_left in reversed(range(_LOOKS)):
            have = self._have(versions)
            if have == target.number and (present := self._copy.present()) is not None:
                return present
            base = have if have is not None and have < target.number else None
            chain = chain_to(versions, target.number, base)
            try:
                try:
                    return self._copy.bring_to(self._storage, self.source, chain, self._progress)
                except CheckpointUnreadableError:
                    raise
                except CheckpointCorruptError as error:
                    if base is None or chain[0].is_whole or self._are_gone(chain):
                        raise
                    # The damage may be in the folder, which the deltas were made for.
                    try:
                        chain = chain_to(versions, target.number, None)
                    except CheckpointNotFoundError:
                        raise error from None
                    logger.warning("%s Reading a whole version for %s.", error, self.folder)
                    return self._copy.bring_to(self._storage, self.source, chain, self._progress)
            except CheckpointCorruptError:
                if not looks_left or not self._are_gone(chain):
                    raise
                logger.info("versions of %s were deleted while they were read; looking again", self.source)
                versions = self._versions.look()
        raise AssertionError("the last look returns or raises")

    def _have(self, versions: Mapping[int, Version]) -> int | None:
        """The number of the version that the folder has, if that is the one of the source."""
        state = self._copy.state
        if state is None:
            return None
        listed = versions.get(state.version)
        return state.version if listed is not None and listed.manifest["attempt"] == state.attempt else None

    def _are_gone(self, chain: Sequence[Version]) -> bool:
        """Whether a version of a chain is no longer in the source, or is another one."""
        versions = self._versions.look()
        return any(
            version.number not in versions or versions[version.number].manifest != version.manifest for version in chain
        )

    def __enter__(self: Self) -> Self:
        self._copy.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._copy.__exit__(*exception)


def follow(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    poll_seconds: float = 1.0,
    timeout: float | None = None,
) -> Generator[Weights, None, None]:
    """Follow published weights: yields the newest version, and each newest one after it.

    A folder on this host is brought to the version before it is yielded. Versions between are skipped: of them only the
    changes are read. Each version is verified. Errors of the source, such as a bucket that does not
    answer, are logged once, and the source is tried again after longer and longer pauses.

    Closing the iterator, or its end, releases the folder. Let go of the arrays and tensors of a version before the next
    one is asked for: while they are there, the folder is copied for each version, instead of changed where it differs.

        for weights in follow("s3://bucket/run/weights"):
            model.load_weights(weights.tensors())

    Args:
        source: folder or URL of the versions (`checkpoint.publish.to` of the training run)
        folder: folder on this host for the weights, which stays; it has room for them twice. None: a private one in the
            folder for temporary files (TMPDIR), deleted at the end.
        options: options of the bucket, for a URL, as in `checkpoint.storage.options`
        poll_seconds: seconds between two looks at the source
        timeout: seconds to wait for a version; None: as long as it takes

    Returns:
        A generator of `Weights`.

    Raises:
        CheckpointConfigError: an argument is invalid, or a package is missing
        CheckpointExistsError: the folder has something else, or versions of another source
        CheckpointInUseError: another process brings the folder to versions
        CheckpointTimeoutError: no version came in time
        CheckpointSaveError: the folder cannot be written
    """
    if not poll_seconds > 0:
        raise CheckpointConfigError(f"poll_seconds={poll_seconds!r}: give seconds above 0.")
    return _weights(path_text(source), None if folder is None else path_text(folder), options, poll_seconds, timeout)


def _weights(
    source: str, folder: str | None, options: Mapping[str, Any] | None, poll_seconds: float, timeout: float | None
) -> Generator[Weights, None, None]:
    with ExitStack() as until_closed:
        if folder is None:
            private = tempfile.mkdtemp(prefix="ckpt-weights-")
            until_closed.callback(file_storage().remove_tree, private)
            folder = os.path.join(private, "weights")
        receiver = until_closed.enter_context(Receiver(source, folder, options=options))
        is_first = True
        for pulled in receiver.follow(poll_seconds, timeout):
            changed = None if is_first else pulled.changed
            is_first = False
            yield Weights(pulled.version, pulled.step, pulled.path, changed, pulled.nbytes, pulled.lag)
