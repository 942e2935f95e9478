"""Load a committed checkpoint from the memory of this host's keepers while they have it, else from its storage."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from ..core.commit.manifest import data_folder, read_manifest
from ..core.state.flatten import StateDict
from ..core.storage.locate import absolute
from ..core.storage.memory.job_keepers import JobKeepers
from ..core.storage.memory.keeper_sockets import SCHEME, roots_here
from ..core.storage.memory.kept_runs import kept_run
from ..core.storage.storage import Storage
from ..errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, CheckpointUnreadableError
from .collective import Phase
from .load_options import LoadOptions
from .reader import Reader

logger = logging.getLogger("ckpt_component.readers")


def copy_in_memory(path: str, storage: Storage, storage_of: Callable[[str], Storage]) -> str:
    """Where in memory a checkpoint is, whose commit in its storage is the same attempt of the same run.

    Args:
        path: its path in its storage
        storage: that storage
        storage_of: returns the storage of a path in memory

    Raises:
        CheckpointNotFoundError: no keeper of this host has it, or it is not committed
        CheckpointUnreadableError: a keeper does not answer
    """
    try:
        manifest = _manifest_of(storage, path) if roots_here() else {}
        run = kept_run(str(manifest["run"])) if "run" in manifest else None
        if run is not None:
            near = os.path.join(run.memory, os.path.basename(absolute(path)))
            memory = storage_of(near)
            kept = read_manifest(memory, near)
            is_same = kept is not None and _is_same(str(manifest.get("attempt")), str(kept.get("attempt")))
            if kept is not None and is_same and _is_whole(memory, near, kept):  # else other hosts have the rest
                return near
    except OSError as error:
        raise CheckpointUnreadableError(f"The copy of {path} in memory cannot be found: {error}.") from error
    raise CheckpointNotFoundError(f"{path} is not in the memory of this host.")


class NearestReader(Reader):
    """A `Reader` that takes a checkpoint from memory if every rank finds it there. Arguments as for `Reader`."""

    def read(
        self, path: str, state_dict: StateDict | torch.nn.Module | None = None, **options: Any
    ) -> tuple[Any, list[str]]:
        """See `Reader.read`. A copy in memory that is damaged is passed over by all ranks, with one line."""
        wanted = LoadOptions(**options)
        if (
            wanted.tag is None
            and not path.startswith(SCHEME)
            and (near := self._nearest(path, wanted.alone)) is not None
        ):
            try:
                return super().read(near, state_dict, **{**options, "manifest": None})
            except (CheckpointCorruptError, CheckpointNotFoundError) as error:
                if self._rank == 0:
                    logger.error("%s is loaded from its storage, not from memory: %s", path, error)
        return super().read(path, state_dict, **options)

    def _nearest(self, path: str, alone: bool) -> str | None:
        phase: Phase = nullcontext
        if self._collective is not None and not alone:
            phase = self._collective.load(path).phase
        try:
            with phase("nearest"):
                near = copy_in_memory(path, self._storage_of(path), self._storage_of)
        except CheckpointNotFoundError:
            return None
        except CheckpointCorruptError as error:
            logger.warning("%s is loaded from its storage: %s", path, error)
            return None
        return near


class PeerReader(NearestReader):
    """A `NearestReader` of a run whose snapshots have copies on other hosts.

    Args:
        *arguments: as for `Reader`
        keepers: those of all hosts
        **options: as for `Reader`
    """

    def __init__(self, *arguments: Any, keepers: JobKeepers, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._keepers = keepers

    def read(
        self, path: str, state_dict: StateDict | torch.nn.Module | None = None, **options: Any
    ) -> tuple[Any, list[str]]:
        """See `Reader.read`; says whether bytes came from other hosts."""
        before = self._keepers.received()
        try:
            read = super().read(path, state_dict, **options)
        finally:
            self._keepers.end_load()
        if self.last_read.get("source") == "memory" and self._keepers.received() > before:
            self.last_read["source"] = "peer"
        return read


def _manifest_of(storage: Storage, path: str) -> Mapping[str, Any]:
    """The manifest of a checkpoint; empty: there is none that can be read, of which the load from storage tells."""
    try:
        return read_manifest(storage, path) or {}
    except CheckpointError as error:
        logger.debug("%s is not looked for in memory: %s", path, error)
        return {}


def _is_whole(memory: Storage, path: str, manifest: Mapping[str, Any]) -> bool:
    """Whether all files of a checkpoint can be seen from here."""
    names = [entry["name"] for entry in manifest["files"]]
    return None not in memory.sizes(data_folder(memory, path, manifest), names).values()


def _is_same(attempt: str, first: str) -> bool:
    """Whether an attempt is the first of its save, or a later one, which has a number after the token of the first."""
    return attempt == first or attempt.startswith(f"{first}-")
