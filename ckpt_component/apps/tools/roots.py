"""What `cp`, `mv`, `rm` and `gc` have to know of a root: its naming, who saves there, and its pointer file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ...catalogue.folder import METADATA
from ...errors import CheckpointConfigError, CheckpointError, CheckpointFencedError, CheckpointSaveError
from ...storage.fencing import FencingToken
from ...storage.files import FileStorage
from ...storage.locate import file_storage
from ...storage.manifest import read_manifest
from ...storage.names import MANIFEST, MEGATRON, NAMINGS, StepNames
from ...storage.scan import read_pointer, scan_steps, write_pointer
from .checkpoints import Checkpoint, Root

#: `ROOT@300`: the step of a new checkpoint.
_NEW_STEP = re.compile(r"(.+)@(\d+)")


@dataclass(frozen=True)
class Place:
    """Where a checkpoint is, or will be.

    Attributes:
        path: absolute path.
        names: the naming of its folder; None: it has another name, which no run uses.
        step: the step in such a name.
    """

    path: str
    names: StepNames | None = None
    step: int = -1

    @property
    def root(self) -> str:
        """The folder that it is in."""
        return os.path.dirname(self.path)


def place_of(path: str) -> Place:
    """The place of a path."""
    path = os.path.abspath(path)
    name = os.path.basename(path)
    for names in NAMINGS.values():
        step = names.step(name)
        if step is not None and names.folder(step) == name:
            return Place(path, names, step)
    return Place(path)


def is_one_checkpoint(folder: str) -> bool:
    """Whether a folder is a checkpoint, in which there is no place for others; one with a file of weights is none."""
    return any(os.path.lexists(os.path.join(folder, name)) for name in (MANIFEST, METADATA))


def is_whole_root(argument: str, checkpoint: Checkpoint) -> bool:
    """Whether an argument is a folder of checkpoints, and names none of them."""
    return checkpoint.root is not None and checkpoint.root.path == os.path.abspath(os.path.expanduser(argument))


def destination(fs: FileStorage, argument: str, source: Place) -> Place:
    """Where `cp SOURCE ARGUMENT` puts the checkpoint.

    `ROOT@300`, an existing folder, or one with a slash at the end, which get a checkpoint of the source's step in the
    naming that is used there; else the path itself.

    Raises:
        CheckpointConfigError: `ROOT@WORD` with a word that is no step.
    """
    path, step = os.path.abspath(os.path.expanduser(argument)), source.step
    if "@" in os.path.basename(path) and not os.path.lexists(path):
        match = _NEW_STEP.fullmatch(argument)
        if match is None:
            raise CheckpointConfigError(f"{argument} is no destination; name a new step by its number: ROOT@300.")
        path, step = os.path.abspath(os.path.expanduser(match[1])), int(match[2])
    elif not argument.endswith(os.sep):
        place = place_of(path)
        if place.names is not None or not fs.is_folder(path) or is_one_checkpoint(path):
            return place
    if step < 0:
        return Place(os.path.join(path, os.path.basename(source.path)))
    root = Root(fs, path)
    names = root.names if root.scans else source.names or MEGATRON
    return Place(os.path.join(path, names.folder(step)), names, step)


def file_system_of(root: str) -> FileStorage:
    """The file system operations for a root: without renames where its checkpoints were committed without them."""
    fs = file_storage()
    for name in reversed(fs.names(root)):
        place = place_of(os.path.join(root, name))
        if place.names is None:
            continue
        with suppress(CheckpointError):  # a damaged one; another one says it
            manifest = read_manifest(fs, place.path)
            if manifest is not None:
                return file_storage(atomic_rename="at" not in manifest)
    return fs


def refuse_running(fs: FileStorage, place: Place, what: str, *, ended: bool) -> None:
    """Refuse to change a run's checkpoints while it may be alive.

    Args:
        fs: the file system.
        place: the checkpoint; with a name that no run uses, nothing is refused.
        what: what is refused, for the text: `... is not moved`.
        ended: the user says that a run on another host has ended.

    Raises:
        CheckpointFencedError: the run that owns the root is alive, or may be.
    """
    if place.names is None:
        return
    owner = FencingToken(fs, place.root, place.names).neighbor()
    if owner is None or (owner.alive is None and ended):
        return
    advice = "end it first" if owner.alive else "if it has ended, type --ended"
    raise CheckpointFencedError(
        f"{what}: {place.root} belongs to a run that {'is' if owner.alive else 'may be'} alive, {owner}; {advice}."
    )


def point_elsewhere(fs: FileStorage, root: str, names: StepNames, leaving: Sequence[int]) -> None:
    """Before checkpoints leave a root: have the pointer file name the newest of those that stay.

    It never names a step that is not there: a program that reads it then fails or starts from scratch.
    """
    if read_pointer(fs, root, names) not in leaving:
        return
    steps = {*scan_steps(fs, root, names).committed} - {*leaving}
    if steps:
        write_pointer(fs, root, names, max(steps))
    else:
        fs.unlink(os.path.join(root, names.pointer))
        fs.sync_folder(root)


def point_to(fs: FileStorage, place: Place) -> None:
    """After a checkpoint came into a root: have the pointer file name it if it is newer than what the file names."""
    if place.names is None:
        return
    pointed = read_pointer(fs, place.root, place.names)
    if pointed is None or pointed < place.step:
        committed = scan_steps(fs, place.root, place.names).committed
        write_pointer(fs, place.root, place.names, max([place.step, *committed]))


def shown(path: str) -> str:
    """A path for a line of text, relative to the working folder if it is inside."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def tree_bytes(fs: FileStorage, path: str) -> int:
    """Bytes of a file, or of the files in a folder."""
    if not fs.is_real_folder(path):
        return fs.size(path) or 0
    return sum(tree_bytes(fs, os.path.join(path, name)) for name in fs.names(path))


@contextmanager
def typed_errors(what: str) -> Iterator[None]:
    """Raise an OSError as a CheckpointSaveError whose text begins with `what`."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointSaveError(f"{what}: {error}.", error.errno) from error
