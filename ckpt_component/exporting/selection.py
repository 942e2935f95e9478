"""Which tensors of a checkpoint an export has, and under which names."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..errors import CheckpointLoadError
from ..formats import Entry, Index
from ..state.dtypes import WIDTHS
from ..state.key_map import KeyMap, RenamedKeys, unknown_names
from ..state.paths import FROZEN, Path
from .casting import cast_dtype

#: Where most states have the model.
MODEL = "model"


class Tensor(NamedTuple):
    """A tensor of an export.

    Attributes:
        name: its key in the export
        path: its path, if the export is nested
        entry: the tensor in the checkpoint
        dtype: its dtype in the export
        tied: keys and paths of the tensors that are stored with it
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
    """Tensors, tied ones once; objects with their paths; and containers, as `Contents` has them.

    `lacks_frozen`: what was chosen has frozen parameters that the checkpoint does not have.
    """

    tensors: list[Tensor]
    objects: list[tuple[Path, Entry]]
    containers: list[tuple[Path, str]]
    lacks_frozen: bool = False


def select(index: Index, prefix: str, key_map: KeyMap, to_dtype: str | None) -> Selected:
    """Which values of a checkpoint are exported, and under which names.

    Args:
        index: the checkpoint
        prefix: only what is below this name, which is taken away
        key_map: what follows, with the names after that
        to_dtype: as for `cast_dtype`

    Raises:
        CheckpointLoadError: a name fits no key, or two tensors would get one name
    """
    where, prefix = index.path, prefix.removesuffix(".")
    below = index.contents.below(prefix)
    if not below.paths():
        raise CheckpointLoadError(unknown_names("prefix", [prefix], index.contents.paths(), where))
    stripped = RenamedKeys(below.paths(), KeyMap({prefix: ""} if prefix else {}), where)
    renamed = RenamedKeys([*stripped.paths.items()], key_map, where)
    renamed.refuse_unused()
    chosen = below.renamed(stripped).renamed(renamed)
    tensors: dict[object, Tensor] = {}
    for name, (_, path, dtype, shape, _, place) in chosen.tensors.items():
        tie = (dtype, shape, place) if math.prod(shape) else name
        if tie in tensors:
            tensors[tie] = tensors[tie]._replace(tied=(*tensors[tie].tied, (name, path)))
        else:
            stored = index.entries[stripped.old[renamed.old[name]]]
            tensors[tie] = Tensor(name, path, stored, cast_dtype(dtype, to_dtype))
    others = {name: entry for name, entry in chosen.objects.items() if FROZEN not in entry.path}
    objects = [(entry.path, index.entries[stripped.old[renamed.old[name]]]) for name, entry in others.items()]
    if not tensors:
        raise CheckpointLoadError(f"There is no tensor to export in {where}: {len(objects)} objects were chosen.")
    return Selected([*tensors.values()], objects, chosen.containers, len(others) < len(chosen.objects))


def model_prefix(index: Index) -> str:
    """`model` if a nested state has its model there; else nothing.

    Names such as `model.embed_tokens` in a flat state dict belong to the model itself, and are not such a prefix.
    """
    nested = any(
        entry.kind == "tensor" and len(entry.path) > 1 and entry.path[0] == MODEL for entry in index.entries.values()
    )
    return MODEL if nested else ""
