"""Delete or quarantine checkpoints, and sweep up the leftovers of dead runs.

How a folder was committed is read from the disk (see `protocols`): the run that left it may have had another way.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Iterator

from ...errors import CheckpointError
from ..storage.new_names import NEW_PREFIX
from ..storage.storage import Storage
from .liveness import LifeSigns, marked_attempt
from .manifest import read_manifest
from .manifest_commit import attempts_in, is_quarantined
from .names import (
    ALIVE_PREFIX,
    STAGING_PREFIX,
    TRASH_PREFIX,
    TRIAL_PREFIX,
    StepNames,
    is_owned_token,
    is_token_of_this_host,
    token_of,
)
from .protocol import remove_if_empty
from .protocols import protocol_of, protocol_on_disk

logger = logging.getLogger("ckpt_component.storage")


def discard(fs: Storage, path: str) -> bool:
    """Delete a checkpoint or a staging folder, manifest first. Logs a warning and returns False on failure."""
    try:
        protocol = protocol_on_disk(fs, path)
    except OSError as error:
        logger.warning("%s could not be deleted: %s", path, error)
        return False
    return protocol.discard(path)


def quarantine(fs: Storage, path: str) -> str:
    """Durably move a damaged checkpoint out of the way; returns the new path of its data.

    From then on this package neither lists, counts, loads nor deletes it. The name of the step becomes free, so the run
    can save that step again.

    Raises:
        OSError: the checkpoint could not be moved and stays where it is.
    """
    return protocol_on_disk(fs, path).quarantine(path)


def sweep(fs: Storage, root: str, steps: StepNames, fenced: Collection[str] = ()) -> list[str]:
    """Delete what dead processes left in `root`: unfinished and half-deleted checkpoints.

    Files of a live process are kept (a trainer, or a writer process that is still finishing, see `liveness`), and so
    is everything with another prefix or from another host. Returns the deleted names.

    Args:
        fs: the file system.
        root: folder of the checkpoints.
        steps: how steps are named there.
        fenced: names from `leftovers` that can no longer be committed; these are deleted whichever host made them.
    """
    signs = LifeSigns(fs, root)
    deleted = []
    for name in _dead(fs, signs, _unfinished(fs, root, steps, signs.names), fenced):
        if _removed(fs, os.path.join(root, name)):
            deleted.append(name)
    _remove_empty_steps(fs, signs, steps, {os.path.dirname(name) for name in deleted})
    return deleted


def _removed(fs: Storage, path: str) -> bool:
    """Delete an unfinished folder or a small file of dead processes. A failure is a warning."""
    try:
        if not fs.is_real_folder(path):
            fs.unlink(path)
        else:
            protocol_of(fs).remove_unfinished(path)
    except FileNotFoundError:
        return False  # committed or deleted concurrently
    except OSError as error:
        logger.warning("%s was left by a dead run and could not be deleted (%s)", path, error)
        return False
    return True


def sweep_attempts(fs: Storage, target: str) -> None:
    """Delete what dead processes of this host left beside `target` of attempts to make it or to replace it."""
    root, target_name = os.path.split(target)
    signs = LifeSigns(fs, root)
    starts = (f"{STAGING_PREFIX}{target_name}", f"{TRASH_PREFIX}{target_name}")
    for name in _dead(fs, signs, [name for name in signs.names if name.rpartition(".")[0] in starts]):
        _removed(fs, os.path.join(root, name))


def debris(fs: Storage, root: str, steps: StepNames, fenced: Collection[str] = ()) -> list[str]:
    """The names that `sweep` would delete now."""
    return list(_dead(fs, LifeSigns(fs, root), _unfinished(fs, root, steps, fs.names(root)), fenced))


def living_attempts(fs: Storage, root: str, steps: StepNames) -> list[str]:
    """Attempts in `root` that a live process of this host is still working on."""
    signs = LifeSigns(fs, root)
    attempts = []
    for name in _unfinished(fs, root, steps, signs.names):
        path, token = os.path.join(root, name), token_of(name)
        try:
            if not _is_attempt(name) or not is_token_of_this_host(token) or not signs.is_alive(path, token):
                continue
        except FileNotFoundError:
            continue  # committed or deleted concurrently
        except OSError as error:
            logger.warning("cannot tell whether a process is working on %s (%s); not waiting for it", path, error)
            continue
        if not _is_kept(fs, root, name):
            attempts.append(name)
    return attempts


def unfinished_in(fs: Storage, root: str, steps: StepNames) -> dict[str, bool]:
    """What is unfinished, half deleted or a mark of life in `root` -> whether a process is, or may be, working on it.

    What is not in use is debris, which `sweep` deletes once the host that made it, or a new owner, gets to it.

    Args:
        fs: the file system.
        root: folder of the checkpoints.
        steps: how steps are named there.
    """
    signs, in_use = LifeSigns(fs, root), {}
    for name in _unfinished(fs, root, steps, signs.names):
        try:
            if not _is_kept(fs, root, name):
                in_use[name] = not _is_dead(fs, signs, name, here=is_token_of_this_host(token_of(name)))
        except FileNotFoundError:
            continue  # committed or deleted concurrently
    return in_use


def leftovers(fs: Storage, root: str, steps: StepNames) -> set[str]:
    """Names of what earlier owners of `root` left there, on any host. The next owner deletes them."""
    return {
        name
        for name in _unfinished(fs, root, steps, fs.names(root))
        if not _is_attempt(name) or (is_owned_token(token_of(name)) and not _is_kept(fs, root, name))
    }


def _unfinished(fs: Storage, root: str, steps: StepNames, names: list[str]) -> Iterator[str]:
    """Names below `root` of attempts, half-deleted folders and small files; `_is_kept` says which attempts to keep."""
    for name in names:
        if name.startswith((STAGING_PREFIX, TRASH_PREFIX, TRIAL_PREFIX, ALIVE_PREFIX, NEW_PREFIX)):
            yield name
        elif steps.step(name) is not None:
            try:
                yield from [f"{name}/{token}" for token in attempts_in(fs, os.path.join(root, name))]
            except OSError as error:
                logger.warning("could not list what dead runs left in %s (%s)", os.path.join(root, name), error)


def _is_attempt(name: str) -> bool:
    return "/" in name or name.startswith(STAGING_PREFIX)


def _is_kept(fs: Storage, root: str, name: str) -> bool:
    """Whether an attempt's folder is, or may be, the data of a checkpoint."""
    step, _, token = name.rpartition("/")
    if not step:
        return False
    if is_quarantined(fs, os.path.join(root, name)):
        return True
    try:
        manifest = read_manifest(fs, os.path.join(root, step))
    except CheckpointError:
        return True  # it may name this attempt; the scan reports what is wrong with it
    return manifest is not None and manifest.get("at") == token


def _dead(fs: Storage, signs: LifeSigns, names: Iterable[str], fenced: Collection[str] = ()) -> Iterator[str]:
    """Those of some names that dead processes left; each is examined when it is asked for."""
    staying = set[str]()
    # A mark goes after its attempt: without it, the next start could not tell that the attempt is dead.
    for name in sorted(names, key=lambda name: name.startswith(ALIVE_PREFIX)):
        here = is_token_of_this_host(token_of(name))
        if not here and name not in fenced:
            continue
        try:
            if marked_attempt(name) in staying and not signs.is_silent(os.path.join(signs.root, name)):
                continue
            if _is_dead(fs, signs, name, here=here):
                yield name
            elif _is_attempt(name):
                staying.add(token_of(name))
        except FileNotFoundError:
            continue  # committed or deleted concurrently
        except OSError as error:
            logger.warning("cannot tell whether %s is in use (%s)", os.path.join(signs.root, name), error)


def _is_dead(fs: Storage, signs: LifeSigns, name: str, *, here: bool) -> bool:
    """Whether a folder or a small file is no longer in use. `here`: a process of this host made it."""
    path = os.path.join(signs.root, name)
    if fs.is_real_folder(path):
        # Check liveness first: an attempt that is not alive can no longer be committed.
        alive = signs.is_alive(path, token_of(name), here=here)
        return not (alive or _is_kept(fs, signs.root, name) or signs.is_young(path))
    if fs.size(path) is None:
        return False
    if here and name.startswith(TRIAL_PREFIX):
        return not signs.is_young(path)  # a young one is about to be deleted by the process that made it
    return signs.is_quiet(path)


def _remove_empty_steps(fs: Storage, signs: LifeSigns, steps: StepNames, emptied: Collection[str]) -> None:
    """Delete empty step folders, which attempts that are made inside them can leave behind."""
    leaves_empty = protocol_of(fs).creates_targets
    for name in signs.names:
        path = os.path.join(signs.root, name)
        if steps.step(name) is None or not (leaves_empty or name in emptied):
            continue
        try:
            if fs.is_real_folder(path) and not fs.names(path) and (name in emptied or not signs.is_young(path)):
                remove_if_empty(fs, path)
        except OSError as error:
            logger.warning("%s was left by a dead run and could not be deleted (%s)", path, error)
