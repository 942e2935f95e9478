"""Load what was stored with another wrapping, where no module says which parts of a name are a wrapper's.

Older checkpoints, files of other programs and plain dicts such as `{"model": data_parallel.state_dict()}` have names
such as `model.module.0.weight`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from ..core.formats.index import Contents, Entry
from ..core.state.paths import Path, key_of
from ..core.state.wrapped_modules import without_wrappers
from .source import RenamedSource, Source


def under_names_of_target(source: Source, keys: Sequence[str], paths: Sequence[Path]) -> tuple[Source, list[str]]:
    """Give values of a checkpoint the names that a target has for them, if only parts of wrappers differ.

    A value is renamed if the target lacks its name, the checkpoint lacks the target's, and no other value of either
    has the same name without these parts.

    Args:
        source: the checkpoint
        keys: all keys of the target
        paths: their paths

    Returns:
        The checkpoint, and a sentence about what was renamed, to log.
    """
    known, contents = {*keys}, source.contents
    here = _alone((key, path) for key, path in zip(keys, paths, strict=True) if not _has(contents, key))
    there = _alone((key, path) for key, path in contents.paths() if key not in known)
    found = {there[plain][0]: here[plain] for plain in here.keys() & there.keys()}
    if not found:
        return source, []
    renamed, new_paths = Contents(columns=contents.columns), dict[Path, Path]()
    for entries, new_entries in ((contents.tensors, renamed.tensors), (contents.objects, renamed.objects)):
        for old, entry in entries.items():
            key, path = found.get(old, (old, entry.path))
            new_entries[key] = Entry(key, path, *entry[2:])
            if key != old:
                new_paths.update(_around(entry.path, path))
    renamed.containers = [(new_paths.get(path, path), kind) for path, kind in contents.containers]
    first, (its, _) = next(iter(found.items()))
    more = f" and {len(found) - 1} others" if len(found) > 1 else ""
    note = f"'{its}'{more} are loaded from other names of {source.where}, such as '{first}': only the wrapping differs"
    return RenamedSource(source, renamed, {key: old for old, (key, _) in found.items()}), [note]


def _has(contents: Contents, key: str) -> bool:
    return key in contents.tensors or key in contents.objects


def _alone(named: Iterable[tuple[str, Path]]) -> dict[str, tuple[str, Path]]:
    """Keys with their paths, by the name without parts of wrappers, if no other has the same."""
    by_plain: dict[str, set[tuple[str, Path]]] = defaultdict(set)
    for key, path in named:
        by_plain[without_wrappers(key)].add((key, path))
    return {plain: each.pop() for plain, each in by_plain.items() if len(each) == 1}


def _around(old: Path, new: Path) -> dict[Path, Path]:
    """The containers around a value that are below the name that differs, by old path, with their new ones."""
    depth = next((depth for depth, (one, other) in enumerate(zip(reversed(old), reversed(new))) if one != other), 0)
    return {old[:-back]: new[:-back] for back in range(1, depth + 1)}
