"""What `cp`, `mv`, `rm` and `gc` have to know of a root: its naming, who saves there, and its pointer file."""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ..core.commit.fencing import FencingToken
from ..core.commit.manifest import read_manifest
from ..core.commit.names import MANIFEST, MEGATRON, NAMINGS, StepNames
from ..core.commit.scan import read_pointer, scan_steps, write_pointer
from ..core.storage.locate import absolute, is_url, storage_at
from ..core.storage.space import amount
from ..core.storage.storage import Storage, StoredFile
from ..errors import CheckpointConfigError, CheckpointError, CheckpointFencedError, CheckpointSaveError, printable
from ..formats.checkpoints import Root
from ..formats.folder import METADATA


@dataclass(frozen=True)
class Usage:
    """The space that some files take, in bytes.

    Attributes:
        size: sum of their sizes, as if each path had a file of its own
        taken: what they take; a file to which several of the paths lead counts once
        freed: what deleting them all would free: files to which no other path leads
    """

    size: int
    taken: int
    freed: int

    @property
    def shared(self) -> int:
        """What other paths lead to as well, and so stays when these are deleted."""
        return self.taken - self.freed


def usage_of(files: Iterable[StoredFile]) -> Usage:
    """The space that files take, each of which is given by one path or by several."""
    files = [*files]
    paths = Counter(file.identity for file in files)
    once = {file.identity: file for file in files}.values()
    return Usage(
        sum(file.size for file in files),
        sum(file.size for file in once),
        sum(file.size for file in once if paths[file.identity] >= file.paths),
    )


def freed_text(usage: Usage, dry_run: bool) -> Iterator[str]:
    """A line about what deleting files frees, if it is not their size."""
    if usage.freed != usage.size:
        yield f"{'would free' if dry_run else 'freed'} {amount(usage.freed)}; other checkpoints use the same files"


def files_in(fs: Storage, path: str) -> Iterator[StoredFile]:
    """The files of a folder, which may be given by a link to it; no link in it is followed."""
    yield from fs.files_below(path if is_url(path) else os.path.realpath(path))


#: `ROOT@300`: the step of a new checkpoint.
_NEW_STEP = re.compile(r"(.+)@(\d+)")


def add_safeguards(parser: argparse.ArgumentParser, verb: str) -> None:
    """Add `--ended` and `--dry-run`."""
    parser.add_argument("--ended", action="store_true", help="the run that owns the root and may be alive has ended")
    parser.add_argument("--dry-run", action="store_true", help=f"print what would happen and {verb} nothing")


@dataclass(frozen=True)
class Location:
    """Where a checkpoint is, or will be.

    Attributes:
        fs: the storage; without renames where the checkpoints of its root were committed without them
        path: absolute path, or URL
        names: the naming of its folder; None: it has another name, which no run uses
        step: the step in such a name
    """

    fs: Storage
    path: str
    names: StepNames | None = None
    step: int = -1

    @property
    def root(self) -> str:
        """The folder that it is in."""
        return os.path.dirname(self.path)

    def refuse_running(self, what: str, *, ended: bool) -> None:
        """Refuse to change a run's checkpoints while it may be alive.

        Args:
            what: what is refused, for the text: `... is not moved`
            ended: the user says that a run on another host has ended

        Raises:
            CheckpointFencedError: the run that owns the root is alive, or may be
        """
        owner = None if self.names is None else FencingToken(self.fs, self.root, self.names).neighbor()
        if owner is None or (owner.alive is None and ended):
            return
        advice = "end it first" if owner.alive else "if it has ended, type --ended"
        raise CheckpointFencedError(
            f"{what}: {self.root} belongs to a run that {'is' if owner.alive else 'may be'} alive, {owner}; {advice}."
        )

    def point_to(self) -> None:
        """After a checkpoint came here: have the pointer file name it if it is newer than what the file names."""
        if self.names is None:
            return
        pointed = read_pointer(self.fs, self.root, self.names)
        if pointed is None or pointed < self.step:
            committed = scan_steps(self.fs, self.root, self.names).committed
            write_pointer(self.fs, self.root, self.names, max([self.step, *committed]))


def place_of(path: str, options: Mapping[str, str] | None = None, *, by_rename: bool | None = None) -> Location:
    """The place of a path.

    Args:
        path: absolute path, or URL
        options: `-o` of the command line, for a URL
        by_rename: whether checkpoints there are committed by a rename; None: as those that are there
    """
    fs = storage_at(path, options=options)
    if not is_url(path) and not (_is_by_rename(fs, os.path.dirname(path)) if by_rename is None else by_rename):
        fs = storage_at(path, atomic_rename=False)
    return _named(fs, path)


def _named(fs: Storage, path: str) -> Location:
    name = os.path.basename(path)
    for names in NAMINGS.values():
        step = names.step(name)
        if step is not None and names.folder(step) == name:
            return Location(fs, path, names, step)
    return Location(fs, path)


def _is_by_rename(fs: Storage, root: str) -> bool:
    """Whether the newest checkpoint of a folder, if any can be read, was committed by a rename."""
    for name in reversed(fs.names(root)):
        place = _named(fs, os.path.join(root, name))
        if place.names is None:
            continue
        with suppress(CheckpointError):  # a damaged one; another one says it
            manifest = read_manifest(fs, place.path)
            if manifest is not None:
                return "at" not in manifest
    return True


def is_one_checkpoint(fs: Storage, folder: str) -> bool:
    """Whether a folder is a checkpoint, in which there is no place for others; one with a file of weights is none."""
    return any(fs.exists(os.path.join(folder, name)) for name in (MANIFEST, METADATA))


def destination(argument: str, source: Location, options: Mapping[str, str], commit: str | None) -> Location:
    """Where `cp SOURCE ARGUMENT` puts the checkpoint.

    `ROOT@300`, an existing folder, or one with a slash at the end, which get a checkpoint of the source's step in the
    naming that is used there; else the path itself.

    Args:
        argument: as on the command line
        source: the checkpoint
        options: `-o` of the command line, for a URL
        commit: `--commit` of the command line

    Raises:
        CheckpointConfigError: `ROOT@WORD` with a word that is not a step
    """
    path, step, fs = absolute(argument), source.step, storage_at(argument, options=options)
    by_rename = None if commit is None else commit == "rename"
    if "@" in os.path.basename(path) and not fs.exists(path):
        match = _NEW_STEP.fullmatch(argument)
        if match is None:
            raise CheckpointConfigError(f"{argument} is no destination; name a new step by its number: ROOT@300.")
        path, step = absolute(match[1]), int(match[2])
    elif not argument.endswith(os.sep):
        names = _named(fs, path).names
        if names is not None or not fs.is_folder(path) or is_one_checkpoint(fs, path):
            return place_of(path, options, by_rename=by_rename)
    name = os.path.basename(source.path)
    if step >= 0:
        root = Root(fs, path)
        name = (root.names if root.scans else source.names or MEGATRON).folder(step)
    return place_of(os.path.join(path, name), options, by_rename=by_rename)


def point_elsewhere(fs: Storage, root: str, names: StepNames, leaving: Sequence[int]) -> None:
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


def shown(path: str) -> str:
    """A path for a line of text, relative to the working folder if it is inside."""
    relative = path if is_url(path) else os.path.relpath(path)
    return printable(path if relative.startswith("..") else relative)


def tree_bytes(fs: Storage, path: str) -> int:
    """Bytes of a file, or of the files in a folder; no link is followed."""
    return sum(file.size for file in fs.files_below(path))


@contextmanager
def typed_errors(what: str) -> Iterator[None]:
    """Raise an OSError as a CheckpointSaveError whose text begins with `what`."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointSaveError(f"{what}: {error}.", error.errno) from error
