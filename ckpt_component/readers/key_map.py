"""Rename the keys of a checkpoint for one load, and leave some of them out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from ..errors import CheckpointLoadError, CheckpointTypeError, first_keys
from ..progress import Progress, no_progress
from ..spelling import closest
from ..state.paths import Path, key_of
from .source import Index, Request, Source

#: Names among which a suggestion for a mistyped one is looked for.
_MOST_NAMES = 5000


class KeyMap:
    """Which keys a checkpoint has for one load.

    A name stands for the value with this key and for everything below it. `*` in a name stands for any text, as short
    as possible.

    Args:
        rename: Names in the checkpoint with their names in the target, with as many `*`; an empty name of the target
            takes a name away. A key is renamed once, by the longest name that fits.
        prefix: A name that is put before all keys, after the renames.
        ignore: Names in the checkpoint or else in the target whose values are not loaded.

    Raises:
        CheckpointTypeError: An argument has the wrong type.
        CheckpointLoadError: The numbers of `*` differ.
    """

    def __init__(self, rename: Mapping[str, str] | None = None, prefix: str = "", ignore: Sequence[str] = ()) -> None:
        rename = {} if rename is None else rename
        if not isinstance(rename, Mapping) or not _are_texts([*rename, *rename.values()]):
            raise CheckpointTypeError(
                f"rename={rename!r:.200} must be a dict of names; give old and new ones: rename={{'encoder': 'body'}}."
            )
        if not isinstance(prefix, str):
            raise CheckpointTypeError(f"prefix={prefix!r:.200} must be a name, such as prefix='model'.")
        if isinstance(ignore, (str, bytes)) or not isinstance(ignore, Iterable) or not _are_texts(ignore):
            raise CheckpointTypeError(f"ignore={ignore!r:.200} must be a list of names, such as ignore=['head'].")
        for old, new in rename.items():
            if old.count("*") != new.count("*"):
                raise CheckpointLoadError(
                    f"rename={{{old!r}: {new!r}}} has {old.count('*')} and {new.count('*')} times '*'; each '*' of the "
                    "new name takes the text of one in the old name."
                )
        self.prefix = prefix.removesuffix(".")
        # The longest first.
        self._renames = [
            (old, _pattern(old), rename[old].removesuffix(".").split("*"))
            for old in sorted(rename, key=lambda old: len(old.replace("*", "")), reverse=True)
        ]
        self._ignores = [(name, _pattern(name)) for name in ignore]
        self.keeps_names = not rename and not prefix

    @property
    def names(self) -> dict[str, str]:
        """The names of the checkpoint that this map has, each with the argument that it is from."""
        return {**{old: "rename" for old, *_ in self._renames}, **{name: "ignore" for name, _ in self._ignores}}

    def ignored_names(self) -> list[str]:
        """The names in `ignore` that have no `*`, as the target has them."""
        names = [name.removesuffix(".") for name, _ in self._ignores if "*" not in name]
        return [key_of(self.renamed(tuple(name.split(".")))[1]) for name in names]

    def ignoring(self, key: str) -> list[str]:
        """The names in `ignore` that fit a key."""
        return [name for name, pattern in self._ignores if pattern.match(key)]

    def renamed(self, path: Path) -> tuple[str | None, Path]:
        """The name in `rename` that fits a path's key, or None; and the new path, with `prefix`."""
        key = key_of(path)
        for old, pattern, texts in self._renames:
            match = pattern.match(key)
            if match is not None:
                new = "".join(map("".join, zip(texts, (*match.groups(), ""), strict=True)))
                return old, self._below_prefix(_moved(path, match.end(), new))
        return None, self._below_prefix(path)

    def _below_prefix(self, path: Path) -> Path:
        return (*self.prefix.split("."), *path) if self.prefix else path


class MappedSource(Source):
    """A checkpoint with other keys. Only the keys differ: messages about its files name those that are stored.

    Args:
        source: The checkpoint.
        key_map: Its new keys.

    Raises:
        CheckpointLoadError: A rename fits no key, takes a whole key away, or gives two values one key.
    """

    def __init__(self, source: Source, key_map: KeyMap) -> None:
        self._source = source
        self._key_map = key_map
        self.where = source.where
        self._old: dict[str, str] = {}
        #: Names in the target whose values stay as they are.
        self._ignored: set[str] = set()
        self._unused = key_map.names
        self.index = index = Index()
        for old, path in source.index.paths():
            new, is_ignored = self._new_path(old, path)
            key = key_of(new)
            if is_ignored:
                self._ignored.add(key)
                continue
            if key in self._old:
                first = self._old[key]
                raise CheckpointLoadError(
                    f"'{first}' and '{old}' of {self.where} would both be loaded as '{key}'. Name the one that you do "
                    f"not want in ignore: ignore=[{first!r}]."
                )
            if not key:
                raise CheckpointLoadError(
                    f"rename leaves nothing of the key '{old}' of {self.where}; to leave it out, ignore=[{old!r}]."
                )
            self._old[key] = old
            entry = source.index.tensors.get(old)
            if entry is None:
                index.objects[key] = new
            else:
                index.tensors[key] = entry._replace(path=new)
        used = {path[:depth] for _, path in index.paths() for depth in range(len(path))}
        for path, kind in source.index.containers:
            new, is_ignored = self._new_path(key_of(path), path) if path else (path, False)
            if not is_ignored and (new in used or kind == "empty"):
                index.containers.append((new, kind))
        above = {name for key in self._old for name in _names_above(key)}
        self._ignored.update(name for name in key_map.ignored_names() if name not in above)
        #: Names in `ignore` that only the target may have.
        self._for_target = frozenset(self._unused)
        unused = [name for name, argument in self._unused.items() if argument == "rename"]
        if unused:
            raise self._unused_error(unused)

    def _new_path(self, key: str, path: Path) -> tuple[Path, bool]:
        """A value's new path, and whether it is ignored."""
        ignoring = self._key_map.ignoring(key)
        old, new = self._key_map.renamed(path)
        for name in ignoring or filter(None, [old]):
            self._unused.pop(name, None)
        return new, bool(ignoring)

    def check_ignored(self, keys: Iterable[str]) -> None:
        """Refuse a name in `ignore` that fits no key of the checkpoint and none of these, which a target has.

        Raises:
            CheckpointLoadError: There is such a name.
        """
        for key in keys if self._unused else ():
            for name in self._key_map.ignoring(key):
                self._unused.pop(name, None)
        if self._unused:
            raise self._unused_error([*self._unused])

    def leaves(self, key: str) -> bool:
        """Whether the value of a target's key stays as it is, because of `ignore`."""
        if any(name in self._ignored for name in _names_above(key)):
            return True
        names = self._key_map.ignoring(key)
        return bool(names) and (self._key_map.keeps_names or any(name in self._for_target for name in names))

    def read_tensors(self, requests: Sequence[Request], progress: Progress = no_progress) -> None:
        """Read the tensors under the keys that they are stored with."""
        stored = [request._replace(key=self._old[request.key]) for request in requests]
        self._source.read_tensors(stored, progress)

    def read_objects(self, keys: Sequence[str]) -> Mapping[str, Any]:
        """Read the objects under the keys that they are stored with."""
        values = self._source.read_objects([self._old[key] for key in keys])
        return {key: values[self._old[key]] for key in keys}

    def tied(self, key: str) -> torch.Tensor | None:
        """As of the checkpoint."""
        return self._source.tied(self._old[key])

    def _unused_error(self, names: Sequence[str]) -> CheckpointLoadError:
        arguments = " and ".join(dict.fromkeys(self._key_map.names[name] for name in names))
        paths = [path for _, path in self._source.index.paths()]
        known = dict.fromkeys(islice((name for path in paths for name in _names_above(key_of(path))), _MOST_NAMES))
        close = next(filter(None, (closest(name, known) for name in names)), None)
        first = first_keys([key_of(path) for path in paths], 3)
        hint = f"Did you mean {close!r}?" if close else f"Its keys are {first}."
        fits = "fits" if len(names) == 1 else "fit"
        text = (
            f"{arguments} has {first_keys([repr(name) for name in names])}, which {fits} no key of {self.where}. {hint}"
        )
        return CheckpointLoadError(text)


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _pattern(name: str) -> re.Pattern[str]:
    """The pattern of a name: it fits whole parts from the beginning of a key; the empty name fits any key."""
    name = name.removesuffix(".")
    return re.compile("(.*?)".join(map(re.escape, name.split("*"))) + (r"(?=\.|$)" if name else ""))


def _moved(path: Path, end: int, new: str) -> Path:
    """The path of a key whose first `end` characters become `new`.

    The parts below stay as they are. The new name has as many parts as the old one, because a part may itself have dots
    (`state["model"]["0.weight"]`), and if whole parts were replaced, as many as it has dots.
    """
    if not end:
        return (*new.split("."), *path) if new else path
    depth, rest = 0, str(path[0])
    while end > len(rest):  # the part in which the old name ends
        end -= len(rest) + 1
        depth, rest = depth + 1, str(path[depth + 1])
    rest, below = rest[end:], path[depth + 1 :]
    head = ".".join(filter(None, (new, rest.removeprefix("."))))
    if not head:
        return below
    return (*head.split(".", -1 if below and not rest else depth), *below)


def _names_above(key: str) -> Iterator[str]:
    """The names that fit a key: of the containers around it, from the outermost, and its own."""
    for end in (match.start() for match in re.finditer(r"\.|$", key)):
        yield key[:end]
