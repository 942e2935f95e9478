"""Which tensors of a checkpoint an export has, and under which names."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..core.formats import Entry, Index
from ..core.state.dtypes import WIDTHS
from ..core.state.key_map import KeyMap, RenamedKeys, pattern_of, unknown_names
from ..core.state.paths import Path, key_of
from ..errors import CheckpointLoadError
from .casting import cast_dtype

#: Where most states have the model.
MODEL = "model"


class Tensor(NamedTuple):
    """A tensor of an export.

    Attributes:
        name: Its key in the export.
        path: Its path, if the export is nested.
        entry: The tensor in the checkpoint.
        dtype: Its dtype in the export.
        tied: Keys and paths of the tensors that are stored with it.
    """

    name: str
    path: Path
    entry: Entry
    dtype: str
    tied: tuple[tuple[str, Path], ...] = ()

    @property
    def nbytes(self) -> int:
        """Its bytes in the export."""
        return math.prod(self.entry.shape) * WIDTHS[self.dtype]


class Selected(NamedTuple):
    """Tensors, tied ones once; objects with their paths; and containers, as `Contents` has them."""

    tensors: list[Tensor]
    objects: list[tuple[Path, Entry]]
    containers: list[tuple[Path, str]]


def select(index: Index, prefix: str, key_map: KeyMap, dtype: str | None) -> Selected:
    """Which values of a checkpoint are exported, and under which names.

    Args:
        index: The checkpoint.
        prefix: Only what is below this name, which is taken away.
        key_map: What follows, with the names after that.
        dtype: As for `cast_dtype`.

    Raises:
        CheckpointLoadError: A name fits no key, or two tensors would get one name.
    """
    where, prefix = index.path, prefix.removesuffix(".")
    paths = [(key, entry.path) for key, entry in index.entries.items()]
    below = [row for row in paths if pattern_of(prefix).match(row[0])]
    if not below:
        raise CheckpointLoadError(unknown_names("prefix", [prefix], paths, where))
    stripped = RenamedKeys(below, KeyMap({prefix: ""} if prefix else {}), where)
    renamed = RenamedKeys([*stripped.paths.items()], key_map, where)
    renamed.refuse_unused()
    tensors: dict[object, Tensor] = {}
    objects: list[tuple[Path, Entry]] = []
    for name, path in renamed.paths.items():
        entry = index.entries[stripped.old[renamed.old[name]]]
        if entry.kind != "tensor":
            objects.append((path, entry))
            continue
        place = name if not math.prod(entry.shape) else (entry.dtype, entry.shape, entry.place)
        first = tensors.get(place)
        if first is None:
            tensors[place] = Tensor(name, path, entry, cast_dtype(entry.dtype, dtype))
        else:
            tensors[place] = first._replace(tied=(*first.tied, (name, path)))
    if not tensors:
        raise CheckpointLoadError(f"There is no tensor to export in {where}: {len(objects)} objects were chosen.")
    used = {path[:depth] for path in renamed.paths.values() for depth in range(len(path))}
    containers = []
    for path, kind in index.contents.containers:
        below_prefix = bool(pattern_of(prefix).match(key_of(path)))
        new, ignored = _moved(stripped, renamed, path)
        if new in used or (kind == "empty" and below_prefix and not ignored):
            containers.append((new, kind))
    return Selected([*tensors.values()], objects, containers)


def _moved(stripped: RenamedKeys, renamed: RenamedKeys, path: Path) -> tuple[Path, bool]:
    """The new path of a container, and whether it is ignored."""
    ignored = False
    for keys in (stripped, renamed):
        if path:
            path, ignored = keys.new_path(key_of(path), path)
    return path, ignored


def model_prefix(index: Index) -> str:
    """`model` if a nested state has its model there; else nothing.

    Names such as `model.embed_tokens` in a flat state dict belong to the model itself, and are not such a prefix.
    """
    nested = any(
        entry.kind == "tensor" and len(entry.path) > 1 and entry.path[0] == MODEL for entry in index.entries.values()
    )
    return MODEL if nested else ""
