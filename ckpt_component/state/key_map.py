"""Rename the keys of a checkpoint, and leave some of them out. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from ..core.spelling import closest
from ..errors import CheckpointLoadError, CheckpointTypeError, first_keys
from .paths import Path, key_of, keys_of

#: Names among which a suggestion for a mistyped one is looked for.
_MOST_NAMES = 5000


class KeyMap:
    """Which keys a checkpoint has for one load.

    A name stands for the value with this key and for everything below it. `*` in a name stands for any text, as short
    as possible.

    Args:
        rename: names in the checkpoint with their names in the target, with as many `*`; an empty name of the target
            takes a name away. A key is renamed once, by the longest name that fits.
        prefix: a name that is put before all keys, after the renames
        ignore: names in the checkpoint or else in the target whose values are not loaded

    Raises:
        CheckpointTypeError: an argument has the wrong type
        CheckpointLoadError: the numbers of `*` differ
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
            usual = [ignore] if isinstance(ignore, str) else ["head"]
            raise CheckpointTypeError(f"ignore={ignore!r:.200} must be a list of names, such as ignore={usual!r:.200}.")
        for old, new in rename.items():
            if old.count("*") != new.count("*"):
                raise CheckpointLoadError(
                    f"rename={{{old!r}: {new!r}}} has {old.count('*')} and {new.count('*')} times '*'; each '*' of the "
                    "new name takes the text of one in the old name."
                )
        self.prefix = prefix.removesuffix(".")
        # The longest first.
        self._renames = [
            (old, pattern_of(old), rename[old].removesuffix(".").split("*"))
            for old in sorted(rename, key=lambda old: len(old.replace("*", "")), reverse=True)
        ]
        self._ignores = [(name, pattern_of(name)) for name in ignore]
        self.keeps_names = not rename and not prefix

    @property
    def names(self) -> dict[str, str]:
        """The names of the checkpoint that this map has, each with the argument that it is from."""
        return {**{old: "rename" for old, *_ in self._renames}, **{name: "ignore" for name, _ in self._ignores}}

    def ignored_names(self) -> list[str]:
        """The names in `ignore` that have no `*`, as the target has them."""
        names = [name.removesuffix(".") for name, _ in self._ignores if "*" not in name]
        return [key_of(self.renamed(name, tuple(name.split(".")))[1]) for name in names]

    def ignoring(self, key: str) -> list[str]:
        """The names in `ignore` that fit a key."""
        return [name for name, pattern in self._ignores if pattern.match(key)] if self._ignores else []

    def renamed(self, key: str, path: Path) -> tuple[str | None, Path]:
        """The name in `rename` that fits a key, or None; and the new path, with `prefix`."""
        for old, pattern, texts in self._renames:
            match = pattern.match(key)
            if match is not None:
                new = texts[0]
                if len(texts) > 1:
                    new = "".join(map("".join, zip(texts, (*match.groups(), ""), strict=True)))
                return old, self._below_prefix(_moved(path, match.end(), new))
        return None, self._below_prefix(path)

    def _below_prefix(self, path: Path) -> Path:
        return (*self.prefix.split("."), *path) if self.prefix else path


class RenamedKeys:
    """The keys of a checkpoint under a key map.

    Args:
        paths: its keys with their paths
        key_map: the key map
        where: the checkpoint, for messages

    Attributes:
        old: new key -> the key in the checkpoint
        paths: new key -> new path
        ignored: new keys of the values that `ignore` leaves out
        unused: the names of the key map that fit no key, each with its argument

    Raises:
        CheckpointLoadError: a rename takes a whole key away, or gives two values one key
    """

    def __init__(self, paths: Sequence[tuple[str, Path]], key_map: KeyMap, where: str) -> None:
        self._known = paths
        self._key_map = key_map
        self._where = where
        self.old: dict[str, str] = {}
        self.paths: dict[str, Path] = {}
        self.ignored: set[str] = set()
        self.unused = key_map.names
        moved = [self.new_path(old, path) for old, path in paths]
        keys = keys_of([new for new, _ in moved])
        for (old, _), (new, is_ignored), key in zip(paths, moved, keys, strict=True):
            if is_ignored:
                self.ignored.add(key)
                continue
            if key in self.old:
                first = self.old[key]
                raise CheckpointLoadError(
                    f"'{first}' and '{old}' of {where} would both become '{key}'. Name the one that you do "
                    f"not want in ignore: ignore=[{first!r}]."
                )
            if not key:
                raise CheckpointLoadError(
                    f"rename leaves nothing of the key '{old}' of {where}; to leave it out, ignore=[{old!r}]."
                )
            self.old[key], self.paths[key] = old, new

    def new_path(self, key: str, path: Path) -> tuple[Path, bool]:
        """A value's new path, and whether it is ignored."""
        ignoring = self._key_map.ignoring(key)
        old, new = self._key_map.renamed(key, path)
        if self.unused:
            for name in ignoring or (() if old is None else (old,)):
                self.unused.pop(name, None)
        return new, bool(ignoring)

    def refuse_unused(self, argument: str | None = None) -> None:
        """Refuse names that fit no key.

        Args:
            argument: only those of this argument; None: all

        Raises:
            CheckpointLoadError: there are some; suggests what may be meant
        """
        names = [name for name, its in self.unused.items() if argument in (None, its)]
        if names:
            arguments = " and ".join(dict.fromkeys(self._key_map.names[name] for name in names))
            raise CheckpointLoadError(unknown_names(arguments, names, self._known, self._where))


def unknown_names(argument: str, names: Sequence[str], keys: Sequence[tuple[str, Path]], where: str) -> str:
    """The message about names that fit no key.

    Args:
        argument: where the names are from: `rename`
        names: the names
        keys: the keys of the checkpoint, with their paths
        where: the checkpoint
    """
    known = dict.fromkeys(islice((name for _, path in keys for name in names_above(key_of(path))), _MOST_NAMES))
    close = next(filter(None, (closest(name, known) for name in names)), None)
    first = first_keys([key_of(path) for _, path in keys], 3)
    hint = f"Did you mean {close!r}?" if close else f"Its keys are {first}."
    fits = "fits" if len(names) == 1 else "fit"
    return f"{argument} has {first_keys([repr(name) for name in names])}, which {fits} no key of {where}. {hint}"


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def pattern_of(name: str) -> re.Pattern[str]:
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
    tail = rest[1:]  # after a dot
    head = f"{new}.{tail}" if new and tail else new or tail
    if not head:
        return below
    return (*head.split(".", -1 if below and not rest else depth), *below)


def names_above(key: str) -> Iterator[str]:
    """The names that fit a key: of the containers around it, from the outermost, and its own."""
    for end in (match.start() for match in re.finditer(r"\.|$", key)):
        yield key[:end]
