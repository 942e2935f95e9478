"""Copy or move a checkpoint so that it is never half there, and so that a cut-off command finishes when repeated."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...catalogue.rank_index import read_rank_indexes
from ...catalogue.verification import Item, items_of, small_files, verify_checkpoint, verify_items
from ...errors import CheckpointConfigError, CheckpointCorruptError, CheckpointExistsError, CheckpointSaveError
from ...progress import Progress
from ...storage.cleanup import discard, remove_if_empty, sweep
from ...storage.copying import copy_checkpoint, foreign_files, same_content
from ...storage.fs import FsOps
from ...storage.manifest import check_files, data_folder, read_manifest
from ...storage.names import MEGATRON
from .checkpoints import is_single_checkpoint
from .roots import Place, point_elsewhere, point_to, refuse_running

#: Formats whose files do not say which step they are of.
_RENUMBERED = ("dcp", "torch_save", "safetensors")
_PIECE = 4 << 20


@dataclass(frozen=True)
class Transfer:
    """One copy or move.

    Attributes:
        fs: the file system of both places.
        source: the checkpoint.
        target: where it goes.
        verify: whether to compare checksums, or, without any, the bytes.
        ended: the user says that runs on other hosts have ended.
        progress: follows the bytes.
    """

    fs: FsOps
    source: Place
    target: Place
    verify: bool
    ended: bool
    progress: Progress

    @cached_property
    def manifest(self) -> dict[str, Any] | None:
        """The source's manifest; None: another program saved it."""
        return read_manifest(self.fs, self.source.path)

    def refuse(self, *, moves: bool) -> None:
        """Raise an error if the transfer must not be made.

        Raises:
            CheckpointConfigError: the places do not fit, or the format does not allow another step.
            CheckpointExistsError: the target is there, and is no copy of the source.
            CheckpointFencedError: a run that may be alive uses one of the roots.
        """
        source, target = self.source.path, self.target.path
        if source == target or target.startswith(source + os.sep):
            raise CheckpointConfigError(f"{target} is the checkpoint itself, or inside of it; name another place.")
        if is_single_checkpoint(self.fs, self.target.root):
            raise CheckpointConfigError(
                f"{self.target.root} is a checkpoint itself, and none is put inside of another; name another place."
            )
        if -1 not in (self.source.step, self.target.step) and self.source.step != self.target.step:
            form = "another program" if self.manifest is None else f"the format {self.manifest.get('format')!r:.50}"
            if self.manifest is None or self.manifest.get("format") not in _RENUMBERED:
                raise CheckpointConfigError(
                    f"{source} is of {form}, whose files may hold their step; it cannot become step "
                    f"{self.target.step}. Keep the step, or give it a name without one."
                )
        if self.manifest is None and not self.fs.atomic_rename:
            raise CheckpointConfigError(
                f"{source} has no manifest, and {self.target.root} has no atomic renames, so a copy could not appear "
                "at once; copy it with the tools of the object store."
            )
        if moves:
            refuse_running(self.fs, self.source, f"{self.source.path} is not moved", ended=self.ended)
        refuse_running(self.fs, self.target, f"{self.target.path} is not made", ended=self.ended)
        taken = os.path.lexists(target) and not (self.fs.is_real_folder(target) and not self.fs.names(target))
        if taken and not self.is_there:
            raise CheckpointExistsError(
                f"{target} exists and is no copy of {source}; remove it first, or name another."
            )

    @cached_property
    def is_there(self) -> bool:
        """Whether the target is a copy of the source, left by a command that was cut off."""
        target = self.target.path
        if not self.fs.is_real_folder(target):
            return False
        if self.manifest is not None:
            manifest = read_manifest(self.fs, target)
            if manifest is None or not same_content(self.manifest, manifest):
                return False
            check_files(self.fs, data_folder(target, manifest), manifest)
            return True
        return foreign_files(self.fs, self.source.path) == foreign_files(self.fs, self.target.path)

    def copy(self) -> None:
        """Copy, or verify a copy that is there; then set the pointer."""
        fs, source, target = self.fs, self.source.path, self.target.path
        if not self.is_there:
            if fs.is_folder(self.target.root):
                sweep(fs, self.target.root, self.target.names or MEGATRON)  # what a copy left that was cut off
            copy_checkpoint(
                fs,
                source,
                target,
                check=self._check_of() if self.verify else None,
                progress=self.progress,
                before_commit=lambda: refuse_running(fs, self.target, f"{target} is not made", ended=self.ended),
            )
        elif self.verify and self.manifest is not None:
            verify_checkpoint(fs, target, self.progress)
        elif self.verify:
            for entry in foreign_files(fs, source):
                self._compare(target, entry["name"])
        point_to(fs, self.target)

    def move(self) -> bool:
        """Rename, or copy to another file system and delete; returns whether it was renamed."""
        fs, source, target = self.fs, self.source, self.target
        if not self.is_there and fs.atomic_rename:
            fs.make_folders(target.root)
            if fs.is_real_folder(target.path):
                remove_if_empty(fs, target.path)
            if _same_device(source.root, target.root):
                self._leave()
                try:
                    fs.rename_new(source.path, target.path)
                except OSError as error:
                    point_to(fs, source)
                    if error.errno == errno.EEXIST:
                        raise CheckpointExistsError(f"{target.path} exists; name another place.") from error
                    if error.errno != errno.EXDEV:  # two mounts of one device
                        raise
                else:
                    fs.sync_folder(target.root)
                    fs.sync_folder(source.root)
                    point_to(fs, target)
                    return True
        self.copy()
        self._leave()
        if not discard(fs, source.path):
            raise CheckpointSaveError(f"{target.path} is complete, and {source.path} could not be deleted.")
        return False

    def _leave(self) -> None:
        if self.source.names is not None:
            refuse_running(self.fs, self.source, f"{self.source.path} is not moved", ended=self.ended)
            point_elsewhere(self.fs, self.source.root, self.source.names, [self.source.step])

    def _check_of(self) -> Any:
        """The function that verifies one copied file by its name."""
        if self.manifest is None:
            return self._compare
        folder = data_folder(self.source.path, self.manifest)
        items: dict[str, list[Item]] = {}
        for index in read_rank_indexes(self.fs, folder, self.manifest):
            for item in items_of(folder, index):
                items.setdefault(item.file, []).append(item)
        manifest = self.manifest
        entries = {entry["name"]: entry for entry in manifest["files"]}

        def check(staging: str, name: str) -> None:
            damages = list(small_files(self.fs, staging, {"files": [entries[name]]}))
            verify_items(staging, items.get(name, ()), damages.append)
            if damages:
                raise CheckpointCorruptError(
                    f"{os.path.join(folder, name)}, or its copy, is damaged, so {self.target.path} was not made. "
                    f"{damages[0].error}"
                )

        return check

    def _compare(self, folder: str, name: str) -> None:
        """Compare a copied file with its source: another program's checkpoint has no checksums for it."""
        with open(os.path.join(self.source.path, name), "rb") as one, open(os.path.join(folder, name), "rb") as other:
            while True:
                expected = one.read(_PIECE)
                if expected != other.read(_PIECE):
                    raise CheckpointCorruptError(f"{other.name} is not the same as {one.name}.")
                if not expected:
                    return


def _same_device(one: str, other: str) -> bool:
    return os.stat(one).st_dev == os.stat(other).st_dev
