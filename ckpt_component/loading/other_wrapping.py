"""Load what was stored with another wrapping, where no module says which parts of a name are a wrapper's.

Older checkpoints, files of other programs and plain dicts such as `{"model": data_parallel.state_dict()}` have names
such as `model.module.0.weight`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..formats.index import Contents, Entry
from ..formats.source import MappedSource, RenamedSource, Source
from ..state.paths import Path
from ..state.wrapped_modules import names_in_other_wrapping


def under_names_of_target(
    source: Source, keys: Sequence[str], paths: Sequence[Path], mapped: MappedSource | None = None
) -> tuple[Source, list[str]]:
    """Give values of a checkpoint the names that a target has for them, if only parts of wrappers differ.

    A value is renamed if the target lacks its name, the checkpoint lacks the target's, and no other value of either
    has the same name without these parts.

    Args:
        source: the checkpoint
        keys: all keys of the target
        paths: their paths
        mapped: knows which of them are not loaded, so that their values are left out; None: all are loaded

    Returns:
        The checkpoint, and a sentence about what was renamed, to log.
    """
    contents, place_of = source.contents, dict(zip(keys, paths, strict=True))
    known = contents.entries()
    found = names_in_other_wrapping(place_of.keys() - known.keys(), known.keys() - place_of.keys())
    if not found:
        return source, []
    dropped = {key for key in found if mapped is not None and mapped.is_ignored(key)}
    new_keys, new_paths = {old: key for key, old in found.items()}, dict[Path, Path]()
    renamed = Contents(columns=contents.columns)
    for old, entry in known.items():
        key = new_keys.get(old, old)
        if key not in dropped:
            path = place_of[key] if key in found else entry.path
            (renamed.tensors if entry.dtype else renamed.objects)[key] = Entry(key, path, *entry[2:])
            if key in found:
                new_paths.update(_around(entry.path, path))
    renamed.containers = [(new_paths.get(path, path), kind) for path, kind in contents.containers]
    taken = sorted(found.keys() - dropped)
    more = f" and {len(taken) - 1} more" if len(taken) > 1 else ""
    text = f"{more} under the name of another wrapping, such as"
    return RenamedSource(source, renamed, found), [
        f"{source.where} has '{key}'{text} '{found[key]}'" for key in taken[:1]
    ]


def _around(old: Path, new: Path) -> dict[Path, Path]:
    """The containers around a value that are below the name that differs, by old path, with their new ones."""
    pairs = enumerate(zip(reversed(old), reversed(new), strict=False))
    depth = next((depth for depth, (part, other) in pairs if part != other), 0)
    return {old[:-back]: new[:-back] for back in range(1, depth + 1)}
