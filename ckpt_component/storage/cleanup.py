"""What dead runs leave under a root, and who may delete it: unfinished saves, and half-deleted checkpoints."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator

from ..errors import CheckpointError
from .fs import FsOps
from .layout import attempts_in, is_folder, is_quarantined, remove_if_empty
from .liveness import LifeSigns
from .manifest import read_manifest
from .names import (
    ALIVE_PREFIX,
    STAGING_PREFIX,
    TRASH_PREFIX,
    TRIAL_PREFIX,
    StepNames,
    is_debris_of_this_host,
    is_owned_token,
    is_token_of_this_host,
    token_of_staging,
    trash_path,
)

logger = logging.getLogger(__name__)

#: A folder this young may not have been locked by its process yet.
_YOUNG_SECONDS = 5.0


def sweep(fs: FsOps, root: str, steps: StepNames, fenced: Collection[str] = ()) -> list[str]:
    """Delete what dead processes left in `root`: unfinished and half-deleted checkpoints.

    What belongs to a living process (trainer, or a writer process that is still finishing) stays, see `liveness`; and
    so does everything that has another host's mark or another prefix. Returns the names that were deleted.

    Args:
        fs: where effects go.
        root: folder of the checkpoints.
        steps: how steps are named there.
        fenced: names of `leftovers` that cannot be committed any more, whichever host they are of.
    """
    signs = LifeSigns(fs, root)
    deleted = []
    for name in signs.names:
        path = os.path.join(root, name)
        if steps.step(name) is not None:
            deleted += _sweep_step(fs, signs, path, fenced)
            continue
        here = is_debris_of_this_host(name)
        if not here and name not in fenced:
            continue
        try:
            if not _is_dead(fs, signs, name, here):
                continue
            if is_folder(path):
                _remove_folder(fs, path)
            else:
                fs.unlink(path)
        except FileNotFoundError:
            continue  # it was committed or deleted concurrently
        except OSError as error:
            _warn_left(path, error)
            continue
        deleted.append(name)
    return deleted


def living_attempts(fs: FsOps, root: str, steps: StepNames) -> list[str]:
    """Attempts in `root` that a living process of this host still works on."""
    signs = LifeSigns(fs, root)
    living = []
    for name, path, token in _attempts(fs, root, steps, signs.names):
        try:
            if not is_token_of_this_host(token) or not signs.is_alive(path, token):
                continue
        except FileNotFoundError:
            continue  # it was committed or deleted concurrently
        except OSError as error:
            logger.warning("whether a process works on %s cannot be seen (%s); it is not waited for", path, error)
            continue
        if "/" not in name or not _is_kept(fs, os.path.dirname(path), token):
            living.append(name)
    return living


def leftovers(fs: FsOps, root: str, steps: StepNames) -> set[str]:
    """Names of what runs left in `root` that owned it, which is for the next owner to delete: of any host."""
    names = fs.names(root)
    found = {
        name
        for name, path, token in _attempts(fs, root, steps, names)
        if is_owned_token(token) and ("/" not in name or not _is_kept(fs, os.path.dirname(path), token))
    }
    return found | {name for name in names if name.startswith((TRASH_PREFIX, TRIAL_PREFIX, ALIVE_PREFIX))}


def _attempts(fs: FsOps, root: str, steps: StepNames, names: list[str]) -> Iterator[tuple[str, str, str]]:
    """Name below `root`, path and token of every attempt's folder; some are those of checkpoints (`_is_kept`)."""
    for name in names:
        path = os.path.join(root, name)
        if steps.step(name) is not None:
            for token in attempts_in(fs, path):
                yield f"{name}/{token}", os.path.join(path, token), token
        elif name.startswith(STAGING_PREFIX) and is_folder(path):
            yield name, path, token_of_staging(name)


def _is_dead(fs: FsOps, signs: LifeSigns, name: str, here: bool) -> bool:
    """Whether a folder or a small file of ours in the root is no longer needed."""
    path = os.path.join(signs.root, name)
    if is_folder(path):
        # A very young folder may not have been locked by its owner yet.
        return not signs.is_alive(path, token_of_staging(name), here=here) and not _is_young(signs, path)
    if fs.size(path) is None:
        return False
    if here and name.startswith(TRIAL_PREFIX):
        return not _is_young(signs, path)  # its owner is about to delete it
    return signs.is_quiet(path)


def _remove_folder(fs: FsOps, path: str) -> None:
    """Delete a folder of `sweep`: where there are renames, a process that wakes up late finds all of it or nothing."""
    if fs.atomic_rename and not os.path.basename(path).startswith(TRASH_PREFIX):
        trash = trash_path(path)
        fs.rename_new(path, trash)
        path = trash
    fs.remove_tree(path)


def _sweep_step(fs: FsOps, signs: LifeSigns, folder: str, fenced: Collection[str]) -> list[str]:
    """The same for the attempts inside one step's folder; returns their names below the root."""
    deleted, step = [], os.path.basename(folder)
    try:
        for token in attempts_in(fs, folder):
            path, here = os.path.join(folder, token), is_token_of_this_host(token)
            if not here and f"{step}/{token}" not in fenced:
                continue
            # In this order: once it is not alive, it cannot be committed any more.
            if signs.is_alive(path, token, here=here) or _is_kept(fs, folder, token) or _is_young(signs, path):
                continue
            fs.remove_tree(path)
            deleted.append(f"{step}/{token}")
        # Without renames an empty folder is what is left of an attempt that began or ended there.
        begun = not fs.atomic_rename and is_folder(folder) and not fs.names(folder) and not _is_young(signs, folder)
        if begun or (deleted and not fs.names(folder)):
            remove_if_empty(fs, folder)
    except FileNotFoundError:
        pass  # it was committed or deleted concurrently
    except OSError as error:
        _warn_left(folder, error)
    return deleted


def _is_kept(fs: FsOps, folder: str, attempt: str) -> bool:
    """Whether an attempt's folder is the data of a checkpoint, or may be."""
    if is_quarantined(fs, os.path.join(folder, attempt)):
        return True
    try:
        manifest = read_manifest(fs, folder)
    except CheckpointError:
        return True  # which data it names is unknown; the scan reports what is wrong with it
    return manifest is not None and manifest.get("at") == attempt


def _is_young(signs: LifeSigns, path: str) -> bool:
    return not signs.is_older(path, _YOUNG_SECONDS)


def _warn_left(path: str, error: OSError) -> None:
    logger.warning("%s was left by a dead run and could not be deleted (%s)", path, error)
