"""Copy or move a checkpoint so that it is never half there, and so that a cut-off command finishes when repeated."""

from __future__ import annotations

import errno
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..core.commit.cleanup import discard, sweep_attempts
from ..core.commit.copying import copy_checkpoint, same_content
from ..core.commit.manifest import read_manifest
from ..core.progress import Progress
from ..core.storage.files import local_files
from ..core.storage.locate import below
from ..errors import CheckpointConfigError, CheckpointCorruptError, CheckpointExistsError, CheckpointSaveError
from ..formats.verification import verify_checkpoint, verify_files
from .roots import Location, is_one_checkpoint, point_elsewhere

#: Formats whose files do not say which step they are of.
_RENUMBERED = ("dcp", "torch_save", "safetensors")


@dataclass(frozen=True)
class Transfer:
    """One copy or move.

    Attributes:
        source: the checkpoint
        manifest: its manifest
        target: where it goes
        ended: the user says that runs on other hosts have ended
        progress: follows the bytes
    """

    source: Location
    manifest: Mapping[str, Any]
    target: Location
    ended: bool
    progress: Progress

    def refuse(self, *, moves: bool) -> None:
        """Raise an error if the transfer must not be made.

        Raises:
            CheckpointConfigError: the places do not fit, or the format does not allow another step
            CheckpointExistsError: the target is there, and is not a copy of the source
            CheckpointFencedError: a run that may be alive uses one of the roots
        """
        source, target = self.source.path, self.target.path
        if below(target, source) is not None:
            raise CheckpointConfigError(f"{target} is the checkpoint itself, or inside of it; name another place.")
        if is_one_checkpoint(self.target.fs, self.target.root):
            raise CheckpointConfigError(
                f"{self.target.root} is a checkpoint itself, and none is put inside of another; name another place."
            )
        other_step = -1 not in (self.source.step, self.target.step) and self.source.step != self.target.step
        if other_step and self.manifest.get("format") not in _RENUMBERED:
            raise CheckpointConfigError(
                f"{source} has the format {self.manifest.get('format')!r:.50}, whose files may hold their step; it "
                f"cannot become step {self.target.step}. Keep the step, or give it a name without one."
            )
        if moves:
            self._refuse_running(self.source)
        self._refuse_running(self.target)
        if self.target.fs.exists(target) and not self.is_there:
            raise CheckpointExistsError(
                f"{target} exists and is no copy of {source}; remove it first, or name another."
            )

    @cached_property
    def is_there(self) -> bool:
        """Whether the target is a copy of the source, left by a command that was cut off."""
        fs, path = self.target.fs, self.target.path
        manifest = read_manifest(fs, path) if fs.is_real_folder(path) else None
        return manifest is not None and same_content(self.manifest, manifest)

    def copy(self) -> None:
        """Copy, or verify a copy that is there; then set the pointer."""
        source, target = self.source, self.target
        if self.is_there:
            verify_checkpoint(target.fs, target.path, self.progress)
        else:
            sweep_attempts(target.fs, target.path)  # what a copy left that was cut off
            copy_checkpoint(
                source.fs, source.path, self.manifest, target.fs, target.path, self._before_commit, self.progress
            )
        target.point_to()

    def move(self) -> bool:
        """Rename, or copy to another file system and delete; returns whether it was renamed."""
        if not self.is_there and self._rename():
            return True
        self.copy()
        self._leave()
        if not discard(self.source.fs, self.source.path):
            raise CheckpointSaveError(f"{self.target.path} is complete, and {self.source.path} could not be deleted.")
        return False

    def _rename(self) -> bool:
        """Rename; False where that is not possible: to another file system, or without renames."""
        source, target, fs = self.source, self.target, local_files(self.target.fs)
        if fs is None or not (fs.atomic_rename and source.fs.atomic_rename):
            return False
        fs.make_folders(target.root)
        self._leave()
        try:
            fs.rename_new(source.path, target.path)
        except OSError as error:
            source.point_to()
            if error.errno == errno.EXDEV:
                return False
            raise
        fs.sync_folder(target.root)
        fs.sync_folder(source.root)
        target.point_to()
        return True

    def _leave(self) -> None:
        """Have the source's pointer name another one."""
        if self.source.names is not None:
            self._refuse_running(self.source)
            point_elsewhere(self.source.fs, self.source.root, self.source.names, [self.source.step])

    def _before_commit(self, staging: str, kept: Collection[str]) -> None:
        try:
            verify_files(self.target.fs, staging, self.manifest, self.progress)
        except CheckpointCorruptError as error:
            raise CheckpointCorruptError(
                f"{self.source.path}, or its copy, is damaged, so {self.target.path} was not made: {error}"
            ) from error
        self._refuse_running(self.target)

    def _refuse_running(self, place: Location) -> None:
        what = f"{place.path} is not {'moved' if place is self.source else 'made'}"
        place.refuse_running(what, ended=self.ended)
