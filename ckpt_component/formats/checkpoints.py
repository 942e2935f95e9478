"""From the text that names it to a folder of checkpoints, or to one checkpoint.

A checkpoint is given by its path, or by its folder and what to pick there: `ROOT@200`, `ROOT@newest`, `ROOT@best`.
`ROOT` alone is its newest checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate
from typing import Any

from ..core.commit.cleanup import BestPolicy
from ..core.commit.names import MANIFEST, MEGATRON, NAMINGS, QUARANTINE_PREFIX, SINGLE_FILES, StepNames, step_in_name
from ..core.commit.run_record import stored_config
from ..core.commit.scan import Scan, foreign_checkpoints, scan_steps
from ..core.spelling import closest
from ..core.storage.locate import absolute, storage_at
from ..core.storage.safe_open import read_failure
from ..core.storage.storage import Storage
from ..errors import CheckpointConfigError, CheckpointNotFoundError
from ..events.checked import is_time
from .folder import is_readable

NEWEST, BEST = "newest", "best"


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint that an argument names.

    Attributes:
        fs: its storage
        path: absolute path of the folder or file, or its URL
        step: its step; None: its name has none
        root: the folder that it was picked from; None: the argument is its path
        whole_root: whether the argument is that folder, and picks nothing there
    """

    fs: Storage
    path: str
    step: int | None
    root: Root | None = None
    whole_root: bool = False


class Root:
    """A folder of checkpoints.

    Args:
        fs: its storage
        path: absolute path, or URL

    Attributes:
        scans: what is there under each naming that has steps there
    """

    def __init__(self, fs: Storage, path: str) -> None:
        self.fs = fs
        self.path = path
        scans = {names: scan_steps(fs, path, names) for names in NAMINGS.values()}
        self.scans: dict[StepNames, Scan] = {names: scan for names, scan in scans.items() if _steps_of(scan)}

    @property
    def names(self) -> StepNames:
        """The naming of most of its steps, by default Megatron's."""
        return max(self.scans, key=lambda names: len(_steps_of(self.scans[names])), default=MEGATRON)

    @property
    def scan(self) -> Scan:
        """What is there under `names`."""
        return self.scans.get(self.names, Scan())

    @cached_property
    def others(self) -> list[str]:
        """Paths of apparent checkpoints that have no name of a step, or that of a program without a naming here."""
        listed = {
            os.path.join(self.path, names.folder(step))
            for names, scan in self.scans.items()
            for step in _steps_of(scan)
        }
        return [path for path in foreign_checkpoints(self.fs, self.path, self.scan, self.names) if path not in listed]

    @property
    def quarantined(self) -> list[str]:
        """Names of checkpoints that were set aside."""
        return [name for name in self.fs.names(self.path) if name.startswith(QUARANTINE_PREFIX)]

    @cached_property
    def paths(self) -> dict[int, str]:
        """Step -> path of every folder or file that is, was, or may be a checkpoint; committed ones first."""
        paths: dict[int, str] = {}
        for names, scan in self.scans.items():
            for step in [*scan.committed, *scan.damaged, *scan.torn, *scan.parts, *scan.unusable, *scan.foreign]:
                paths.setdefault(step, os.path.join(self.path, names.folder(step)))
        for path in self.others:
            named = step_in_name(os.path.basename(path))
            if named is not None:
                paths.setdefault(named, path)
        return paths

    @property
    def committed(self) -> list[int]:
        """Steps of committed checkpoints, oldest first."""
        return sorted({step for scan in self.scans.values() for step in scan.committed})

    @property
    def newest(self) -> int | None:
        """The newest committed step; without one, the newest step of another program's checkpoint."""
        steps = self.committed or [step for step, path in self.paths.items() if self._is_foreign(step, path)]
        return max(steps, default=None)

    @cached_property
    def keep(self) -> Mapping[str, Any]:
        """`checkpoint.keep` of the newest checkpoint's config; empty: a checkpointer without a manager saved it."""
        try:
            resolved = stored_config(self.paths[self.committed[-1]], self.fs).resolved if self.committed else {}
        except CheckpointNotFoundError:
            return {}
        return dict(resolved.get("checkpoint", {}).get("keep", {}))

    @cached_property
    def best_policy(self) -> BestPolicy | None:
        """How `keep.best` compares; None: it compares nothing."""
        best = self.keep.get("best", {})
        if not best.get("metric"):
            return None
        return BestPolicy(best["metric"], best.get("mode") == "max", best.get("last", 1))

    @property
    def best(self) -> int | None:
        """The best committed step by `best_policy`; None: no checkpoint has the metric, or there is none."""
        if self.best_policy is None:
            return None
        metrics = {step: scan.metrics[step] for scan in self.scans.values() for step in scan.committed}
        return next(iter(self.best_policy.ranked(metrics)), None)

    def pick(self, word: str) -> FoundCheckpoint:
        """The checkpoint of a step, the newest, or the best.

        Raises:
            CheckpointNotFoundError: there is none
            CheckpointConfigError: the word is something else
        """
        step: int | None
        if word.isdecimal() and word.isascii():
            step = int(word)
            missing = f"has no checkpoint of step {step}{self._near(step)}."
        elif word == NEWEST:
            step, missing = self.newest, f"has no checkpoint; ckpt ls {self.path} shows what is there."
            if step is None:  # whoever opens it is told that it is a part
                step = max((part for scan in self.scans.values() for part in scan.parts), default=None)
        elif word == BEST:
            why = "its config has no checkpoint.keep.best.metric"
            if self.best_policy is not None:
                why = f"no checkpoint has the metric '{self.best_policy.metric}'"
            step, missing = self.best, f"has no best checkpoint: {why}. Name a step, such as {self.path}@200."
        else:
            near = closest(word, [NEWEST, BEST])
            types = f"{self.path}@{near}" if near else "a step, newest or best"
            raise CheckpointConfigError(f"'{word}' after the @ picks no checkpoint; type {types}.")
        if step is None or step not in self.paths:
            raise CheckpointNotFoundError(f"{self.path} {missing}")
        return FoundCheckpoint(self.fs, self.paths[step], step, self)

    def _near(self, step: int) -> str:
        if not self.paths:
            return ", and none of another step"
        near = min(self.paths, key=lambda other: (abs(other - step), other))
        return f"; the nearest is {self.path}@{near}"

    def _is_foreign(self, step: int, path: str) -> bool:
        listed = path in self.others or any(step in scan.foreign for scan in self.scans.values())
        return listed and is_checkpoint(self.fs, path)


def find_root(argument: str, options: Mapping[str, str] | None = None) -> Root:
    """The folder of checkpoints that an argument names.

    Args:
        argument: its path, or its URL
        options: `-o` of the command line, for a URL

    Raises:
        CheckpointNotFoundError: there is no such folder, or it is a checkpoint itself
        OSError: the storage cannot be read
    """
    path, fs = absolute(argument), storage_at(argument, options=options)
    if not fs.is_folder(path):
        if fs.exists(path):
            raise CheckpointNotFoundError(f"{path} is not a folder; name a folder of checkpoints.")
        raise CheckpointNotFoundError(f"{path} does not exist{_typo(fs, path)}")
    root = Root(fs, path)
    below = [other for other in root.others if other != path and fs.is_folder(other)]
    if not root.scans and not below and is_checkpoint(fs, path):  # beside a file of weights there may be checkpoints
        raise CheckpointNotFoundError(
            f"{path} is a checkpoint, not a folder of checkpoints; type ckpt show {argument}, or ckpt ls "
            f"{os.path.dirname(path)}."
        )
    return root


def find_checkpoint(argument: str, options: Mapping[str, str] | None = None) -> FoundCheckpoint:
    """The checkpoint that an argument names.

    Args:
        argument: as on the command line
        options: `-o` of the command line, for a URL

    Raises:
        CheckpointNotFoundError: there is no such checkpoint; the text says what is there
        CheckpointConfigError: what follows the `@` is neither a step, nor `newest`, nor `best`
        OSError: the storage cannot be read
    """
    path, fs = absolute(argument), storage_at(argument, options=options)
    step = step_in_name(os.path.basename(path))
    if fs.is_folder(path):
        root = Root(fs, path)  # beside its checkpoints there may be a file of weights
        if root.scans or (root.paths and not is_checkpoint(fs, path)):
            return replace(root.pick(NEWEST), whole_root=True)
    if fs.exists(path):
        return FoundCheckpoint(fs, path, step)
    root_argument, at, word = argument.rpartition("@")
    root_path = absolute(root_argument)
    if at and fs.is_folder(root_path):
        return find_root(root_argument, options).pick(word)
    if at and (word in (NEWEST, BEST) or word.isdecimal()):
        raise CheckpointNotFoundError(f"{root_path} does not exist{_typo(fs, root_path)}")
    parent = os.path.dirname(path)
    if step is not None and fs.is_folder(parent) and Root(fs, parent).paths:
        raise CheckpointNotFoundError(f"{path} does not exist{Root(fs, parent)._near(step)}.")
    raise CheckpointNotFoundError(f"{path} does not exist{_typo(fs, path)}")


def matching_keys(keys: Sequence[str], pattern: str | None, where: str) -> list[str]:
    """The keys that match a pattern of a shell, or are below it.

    Args:
        keys: all keys
        pattern: such as `model.*`, or a prefix such as `model.layers`; None: all keys match
        where: what has the keys, for the error text

    Raises:
        CheckpointNotFoundError: None matches; the text suggests another pattern
    """
    if pattern is None:
        return [*keys]
    below = f"{pattern}."
    chosen = [key for key in keys if key == pattern or key.startswith(below) or fnmatchcase(key, pattern)]
    if not chosen:
        raise CheckpointNotFoundError(f"No key of {where} matches '{pattern}'; {_hint(pattern, keys)}")
    return chosen


def _hint(pattern: str, keys: Sequence[str]) -> str:
    """What to type instead of a pattern that matches no key."""
    prefixes = {prefix for key in keys for prefix in accumulate(key.split("."), "{}.{}".format)}
    before, star, after = pattern.partition(".*")
    near, wide = closest(before, prefixes), f"*{pattern.strip('*')}*"
    if any(fnmatchcase(key, wide) for key in keys) and (near is None or star):
        near, star, after = wide, "", ""
    return f"did you mean '{near}{star}{after}'?" if near else "ckpt show lists the keys."


def created_of(manifest: Mapping[str, Any]) -> float | None:
    """When a checkpoint was committed, in seconds since 1970; None: its manifest does not say, or says nonsense."""
    created = manifest.get("created")
    return float(created) if created is not None and is_time(created) else None


def is_checkpoint(fs: Storage, path: str) -> bool:
    """Whether a path is one checkpoint of a supported format, a folder or a file.

    Raises:
        CheckpointUnreadableError: the folder cannot be listed
    """
    if not fs.is_folder(path):
        return path.endswith(SINGLE_FILES)
    try:
        names = fs.names(path)
    except OSError as error:
        raise read_failure(path, error) from error
    return MANIFEST in names or is_readable(names)


def _typo(fs: Storage, path: str) -> str:
    """The end of a text about a path that does not exist: the name beside it that is probably meant."""
    folder, name = os.path.split(path)
    near = closest(name, fs.names(folder)) if fs.is_folder(folder) else None
    if name.isdecimal() and near is None:
        return f"; a step is given with its folder, such as runs/one@{name}."
    return "." if near is None else f"; did you mean {os.path.join(folder, near)}?"


def _steps_of(scan: Scan) -> set[int]:
    return {*scan.occupied, *scan.parts, *scan.unfinished, *scan.foreign}
