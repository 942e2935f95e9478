"""A folder of files that other programs read: each top-level key of the state is the name of a file.

A dict is written in the format of the name's ending: `.safetensors` as the safetensors library does, any other as
`torch.save` does. Bytes are written unchanged. So a checkpoint can be what another program expects to find:

    {"model.safetensors": model.state_dict(), "optimizer.pt": optimizer.state_dict(), "config.json": b"..."}
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..core.commit.names import MANIFEST, RUN_RECORD
from ..core.image.layout import ImageFile, Item, Layout
from ..core.pages import PAGE, align
from ..core.storage.safe_open import is_plain_name
from ..core.writing.request import EncodedSave, Extent, ObjectBlob
from ..errors import CheckpointStageError
from ..state.paths import CONTEXT, key_of
from ..state.structure import Relation, Stored, Structure
from .safetensors import SafetensorsPlan
from .torch_save import TorchSavePlan
from .writer import FormatPlan, Writer, extents_by_bytes, make_table

#: Files of the commit, which are next to those of the state.
_RESERVED = re.compile(rf"{re.escape(MANIFEST)}|{re.escape(RUN_RECORD)}|integrity-\d+\.json|\.ckpt-.*")


class FilesWriter(Writer):
    """Files by name. Every rank writes the files of its own state, so their names must differ between ranks."""

    format = "files"

    def plan(self, structure: Structure, rank: int) -> FormatPlan:
        """Lay out the files with tensors."""
        return _FilesPlan(self, structure)


class _FilesPlan(FormatPlan):
    def __init__(self, writer: Writer, structure: Structure) -> None:
        self._object_paths = structure.object_paths
        for path in structure.object_paths:
            if path[-1] == CONTEXT:
                raise CheckpointStageError(
                    f"'{key_of(path[:-1])}' is made of tensors, and the program that loads {path[0]} would not find "
                    "it; save it as a plain tensor."
                )
        paths = [*structure.tensor_paths, *structure.object_paths, *(path for path, _ in structure.containers)]
        #: The files of dicts by name, each with its own plan; the others are bytes.
        self._plans: dict[str, FormatPlan] = {}
        stored: list[Stored] = []
        items: list[Item] = []
        files: list[ImageFile] = []
        constants: list[tuple[int, bytes]] = []
        relations: list[Relation] = []
        extents: list[list[Extent]] = [[] for _ in range(writer.workers)]
        first_stored: list[int] = []
        base = 0
        for name in dict.fromkeys(path[0] for path in paths if path):
            _check_name(name)
            if (name,) in structure.object_paths:
                continue
            numbers, part = structure.below(name)
            if () in part.tensor_paths:
                raise _not_a_file(name, "a tensor")
            if name.endswith(".safetensors"):
                plan: FormatPlan = SafetensorsPlan(writer, part, name)
            else:
                plan = TorchSavePlan(writer, part, name, unchanged=True)
            self._plans[name] = plan
            layout, (image,) = plan.layout, plan.layout.files
            for group, more in zip(extents, extents_by_bytes(layout, writer.workers), strict=False):
                group += [replace(extent, file=len(files), first=extent.first + len(items)) for extent in more]
            items += [item._replace(stored=item.stored + len(stored), file=len(files)) for item in layout.items]
            relations += [(numbers[tensor], numbers[other], distance) for tensor, other, distance in layout.relations]
            constants += [(base + position, data) for position, data in layout.constants]
            first_stored.append(len(stored))
            stored += [entry._replace(tensor=numbers[entry.tensor]) for entry in layout.stored]
            files.append(ImageFile(name, base, image.size))
            base = align(base + image.size, PAGE)
        arounds = [plan.layout.around for plan in self._plans.values()]

        def around(item: Item) -> tuple[bytes, bytes]:
            parts = arounds[item.file]
            return (b"", b"") if parts is None else parts(item._replace(stored=item.stored - first_stored[item.file]))

        self.layout = Layout(
            structure,
            tuple(stored),
            tuple(files),
            items,
            base,
            tuple(constants),
            around,
            self._forget,
            tuple(relations),
        )
        self._table = make_table(writer, self.layout, [group for group in extents if group], keys=False)

    def _forget(self) -> None:
        for plan in self._plans.values():
            if plan.layout.forget is not None:
                plan.layout.forget()

    def encode_objects(self, objects: Sequence[Any]) -> EncodedSave:
        """Pickle what is not a tensor, file by file, and take the files that are bytes."""
        values: dict[str, list[Any]] = defaultdict(list)
        blobs: list[ObjectBlob] = []
        for path, value in zip(self._object_paths, objects, strict=True):
            if len(path) > 1:
                values[path[0]].append(value)
            elif isinstance(value, bytes):
                blobs.append(ObjectBlob(path[0], 0, memoryview(value), ((0, len(value)),)))
            else:
                raise _not_a_file(path[0], f"a {type(value).__name__}")
        for name, plan in self._plans.items():
            blobs += plan.encode_objects(values[name]).object_blobs
        return EncodedSave(self._table, tuple(blobs))


def _check_name(name: Any) -> None:
    if not is_plain_name(name) or _RESERVED.fullmatch(name):
        raise CheckpointStageError(
            f"{name!r} is not a name for a file of a checkpoint; use one without slashes that ckpt_component does not "
            "use itself."
        )


def _not_a_file(name: str, kind: str) -> CheckpointStageError:
    return CheckpointStageError(f"'{name}' is {kind}, and the value of a file is a dict, or its content as bytes.")
