"""`Publisher`: makes a version of the weights of a checkpoint, for inference."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..core.commit.cleanup import Unfinished, discard
from ..core.commit.commit import abandon, begin, new_attempt, publish
from ..core.commit.fencing import FencingToken, read_owner, taken_over
from ..core.commit.liveness import AttemptLock
from ..core.commit.names import owned_token
from ..core.spelling import invalid_choice
from ..core.storage.files import FileStorage
from ..core.storage.new_names import new_token
from ..core.storage.space import FULL, amount
from ..core.storage.storage import Storage
from ..errors import CheckpointConfigError, CheckpointError, CheckpointSaveError, CheckpointStorageFullError
from ..exporting.export import ExportOptions
from .delta import DeltaWriter, can_encode, require_codec
from .local_copy import CopyState
from .mirror import Mirror, WeightFiles, weight_files, write_weights
from .versions import NAMES, Version, Versions, deltas_up_to, to_delete, version_of

#: Values of `delta`, and the encoding that each is.
DELTAS = {"auto": "xor", "overwrite": "overwrite", "off": None}


@dataclass(frozen=True)
class PublishOptions:
    """How to publish.

    Attributes:
        export: which tensors, under which names and as what, in the format `hf`
        delta: `auto`: the changes of the version before, as small as they get; `overwrite`: so that they may be applied
            again; `off`: each version is whole
        whole_every: after so many deltas comes a whole version
        keep: how many of the newest versions are kept, with what they build on
    """

    export: ExportOptions
    delta: str = "auto"
    whole_every: int = 20
    keep: int = 10

    def __post_init__(self) -> None:
        if self.delta not in DELTAS:
            raise CheckpointConfigError(invalid_choice("delta", self.delta, tuple(DELTAS), form="{1}"))
        if self.export.format != "hf":
            raise CheckpointConfigError(f"Versions have the format hf, and not {self.export.format}.")
        for name in ("whole_every", "keep"):
            if getattr(self, name) < 1:
                raise CheckpointConfigError(f"{name} is {getattr(self, name)}; it is at least 1.")

    @property
    def digest(self) -> str:
        """Of what selects and casts the weights."""
        export = self.export
        values = [export.prefix, dict(export.rename), list(export.ignore), export.dtype, export.max_shard_bytes]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


logger = logging.getLogger(__name__)

#: What the folder of the versions is called in the config.
_KEY = "checkpoint.publish.to"
#: A delta with more than this share of the bytes of a whole version does not pay.
_MOST_OF_WHOLE = 0.5


@dataclass(frozen=True)
class Published:
    """A version that was made.

    Attributes:
        version: its number
        step: the training step
        path: its folder
        nbytes: bytes of its files
        whole_nbytes: bytes of the files of a whole version
        is_whole: whether it is one
        seconds: how long it took
        deleted: numbers of the versions that were deleted after it
    """

    version: int
    step: int
    path: str
    nbytes: int
    whole_nbytes: int
    is_whole: bool
    seconds: float
    deleted: list[int]


class Publisher:
    """Makes versions, one after the other. Not for several threads at the same time.

    Args:
        storage: the storage of the versions
        to: the folder of the versions
        mirror: the folder of the mirror on this host, which belongs to this publisher; without deltas there is none
        options: how
        run: token of the run, by which it owns `to`
        fs: the file system of the mirror and of the config files

    Raises:
        CheckpointConfigError: a package that versions need is not installed
    """

    def __init__(
        self, storage: Storage, to: str, mirror: str, options: PublishOptions, run: str, fs: FileStorage
    ) -> None:
        self._encoding = DELTAS[options.delta]
        if self._encoding is not None:
            require_codec(f"checkpoint.publish.delta={options.delta}")
        self._storage = storage
        self._to = to
        self._mirror = Mirror(fs, mirror)
        self._options = options
        self._run = run
        self._fs = fs
        self._versions = Versions(storage, to)

    def publish(self, storage: Storage, path: str, step: int, committed: float) -> Published:
        """Make a version. When this returns, it is complete and durable; after an error it is not there.

        Args:
            storage: the storage of the checkpoint
            path: the checkpoint
            step: its step
            committed: when it was committed, seconds since 1970

        Raises:
            CheckpointNotFoundError: there is no checkpoint
            CheckpointLoadError: a name fits no key
            CheckpointStageError: the format does not have a dtype or a name
            CheckpointCorruptError: the checkpoint is damaged
            CheckpointFencedError: another run publishes there now
            CheckpointInUseError: another process uses the mirror
            CheckpointSaveError: the version cannot be written
        """
        outside = self._storage.outside
        started = outside.now()
        try:
            with (
                weight_files(storage, path, self._options.export, self._fs) as weights,
                nullcontext() if self._encoding is None else self._mirror,
            ):
                self._own()
                versions = self._versions.look()
                number, base = self._versions.next_number, self._base(versions, weights)
                fields = {
                    "version": number,
                    "tensors": len(weights.tensors),
                    "nbytes": sum(tensor.nbytes for tensor in weights.tensors),
                    "options": self._options.digest,
                    "source": path,
                    "committed": committed,
                }
                version = self._version(number, base, weights, {"format": "weights", "step": step, "weights": fields})
                if self._encoding is not None:
                    self._note(version)
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            raise self._failure(error) from error
        versions[number] = version
        deleted = self._delete_old(versions)
        seconds = outside.now() - started
        return Published(number, step, version.path, version.nbytes, weights.nbytes, version.is_whole, seconds, deleted)

    def _delete_old(self, versions: Mapping[int, Version]) -> list[int]:
        """Delete what is not kept; what a version builds on stays with it if that cannot be deleted, or read."""
        deleted, needed = list[int](), {number - 1 for number in self._versions.unreadable}
        for number in to_delete(versions, self._options.keep):
            if number not in needed and discard(self._storage, versions[number].path):
                deleted.append(number)
            else:
                needed.add(versions[number].base or 0)
        return sorted(deleted)

    def _note(self, version: Version) -> None:
        """The mirror has this version. If that cannot be noted, the next one is whole."""
        state = CopyState(
            self._to, version.number, str(version.manifest["attempt"]), version.step, self._options.digest
        )
        try:
            self._mirror.note(state)
        except OSError as error:
            logger.warning("%s is published, and the next version will be whole: %s", version.path, error)

    def _own(self) -> None:
        """Own the folder of the versions, unless another run took it over from this one."""
        owner = read_owner(self._storage, self._to)
        if owner is not None and self._run in owner.earlier and owner.token != self._run:
            raise taken_over(self._to, owner, _KEY)
        if owner is None or owner.token != self._run:
            ownership = FencingToken(self._storage, self._to, NAMES, self._run)
            ownership.acquire()

    def _base(self, versions: Mapping[int, Version], weights: WeightFiles) -> Version | None:
        """The version whose changes are published; None: a whole one is due."""
        options, state, mirror = self._options, self._mirror.state, self._mirror
        encoding, newest = self._encoding, versions.get(self._versions.next_number - 1)
        if encoding is None or newest is None or deltas_up_to(versions, newest) >= options.whole_every:
            return None
        known = None if state is None else (state.source, state.version, state.attempt, state.options)
        if known != (self._to, newest.number, str(newest.manifest["attempt"]), options.digest):
            logger.info("the mirror is not at version %d, so a whole one follows it", newest.number)
            return None
        if not mirror.has_files_of(weights):
            logger.info("other tensors or small files than in version %d: a whole one follows it", newest.number)
            return None
        if not all(can_encode(encoding, tensor.nbytes) for tensor in weights.tensors):
            logger.info("a tensor is too large for the encoding %s, so each version is whole", encoding)
            return None
        return newest

    def _version(self, number: int, base: Version | None, weights: WeightFiles, fields: Mapping[str, Any]) -> Version:
        """Make a version: of the changes, or a whole one if there is no base or they do not pay."""
        if base is not None:
            of_base = {**fields, "weights": {**fields["weights"], "base": base.number}}
            version = self._committed(number, partial(self._write_changes, number, base, weights), of_base)
            if version is not None:
                return version
        elif self._encoding is not None:
            self._mirror.replace(weights)
        free = self._storage.free_bytes(self._to)
        if free is not None and free < weights.nbytes:
            raise OSError(errno.ENOSPC, f"a whole version has {amount(weights.nbytes)}", self._to)
        written = weights if self._encoding is None else self._mirror.copy_of(weights)
        version = self._committed(number, lambda folder: write_weights(self._storage, folder, written), fields)
        assert version is not None  # a copy has files
        return version

    def _write_changes(
        self, number: int, base: Version, weights: WeightFiles, folder: str
    ) -> list[dict[str, Any]] | None:
        """Write the changes since a version, and bring the mirror to the weights; None: a whole one is needed."""
        encoding = self._encoding or ""
        writer = DeltaWriter(self._storage, folder, encoding)
        if not self._mirror.update(weights, encoding, writer):
            logger.warning("the mirror was damaged, so version %d is whole", number)
            return None
        if writer.nbytes > _MOST_OF_WHOLE * weights.nbytes:
            logger.info(
                "the changes have %d of %d bytes, so version %d is whole", writer.nbytes, weights.nbytes, number
            )
            return None
        return writer.close(number, base.number)

    def _committed(
        self, number: int, write: Callable[[str], list[dict[str, Any]] | None], fields: Mapping[str, Any]
    ) -> Version | None:
        """Commit the files that are written into the folder of an attempt; None: there are none."""
        storage, target = self._storage, os.path.join(self._to, NAMES.folder(number))
        if self._versions.has_debris:
            Unfinished(storage, self._to, NAMES).sweep()
        attempt = new_attempt(storage, target, owned_token(new_token(storage.outside)), self._run)
        begin(attempt)
        lock = AttemptLock(storage, attempt)
        try:
            entries = write(attempt.staging)
            if entries is None:
                abandon(attempt)
                return None
            publish(attempt, [{"rank": 0, "files": entries}], {}, fields)
        except BaseException as error:
            abandon(attempt)
            if isinstance(error, (CheckpointSaveError, OSError)):
                self._explain()
            raise
        finally:
            lock.close()
        # Its manifest as `publish` has written it.
        content = {"attempt": attempt.token, "files": entries, "created": storage.outside.date(), **fields}
        return version_of(number, target, content)

    def _explain(self) -> None:
        """After a failure: raise CheckpointFencedError if another run has taken over, which deletes the files here."""
        with suppress(OSError):  # the original failure matters more
            owner = read_owner(self._storage, self._to)
            if owner is not None and owner.token != self._run:
                raise taken_over(self._to, owner, _KEY)

    def _failure(self, error: OSError) -> CheckpointSaveError:
        """The error of a version that could not be written."""
        if error.errno not in FULL:
            return CheckpointSaveError(f"{self._to} cannot take a version: {error}.", error.errno)
        free = self._storage.free_bytes(self._to)
        now = "" if free is None else f"; {amount(free)} are free at {self._to}"
        return CheckpointStorageFullError(
            f"A version cannot be written: {error}{now}. Delete what is not needed there, or lower "
            "checkpoint.publish.keep.",
            error.errno,
        )
