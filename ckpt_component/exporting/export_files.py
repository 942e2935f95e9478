"""The files of an export: which keys are in which, their sizes, and how their bytes are written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..core.storage.checksum import Stream
from ..core.storage.storage import Storage
from ..errors import CheckpointLoadError
from ..formats import Entry, Index
from ..formats.safetensors import header_of
from ..state.dtypes import WIDTHS
from ..state.key_map import KeyMap, RenamedKeys, unknown_names
from ..state.paths import FROZEN, Path
from .blocks import TensorBlocks, cast_dtype, caster

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


#: The name of the weights in a Hugging Face folder.
WEIGHTS = "model"
INDEX = f"{WEIGHTS}.safetensors.index.json"


class File(NamedTuple):
    """One file of an export.

    Attributes:
        name: its name
        places: the tensors with the positions of their bytes, in the order in which they are written
        constants: the bytes around them, by position
    """

    name: str
    places: Sequence[tuple[Tensor, int]]
    constants: Sequence[tuple[int, bytes]]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        ends = [start + tensor.nbytes for tensor, start in self.places]
        return max(ends + [start + len(data) for start, data in self.constants])


def safetensors_file(name: str, tensors: Sequence[Tensor]) -> File:
    """One safetensors file. Of tied tensors it has the first, as transformers and safetensors want it.

    Raises:
        CheckpointStageError: as `header_of`
    """
    aliases = {key: tensor.name for tensor in tensors for key, _ in tensor.tied}
    rows = [(tensor.name, tensor.dtype, tensor.entry.shape, tensor.nbytes) for tensor in tensors]
    header, order = header_of(rows, aliases)
    places, position = [], len(header)
    for number in order:
        places.append((tensors[number], position))
        position += tensors[number].nbytes
    return File(name, places, [(0, header)])


def hugging_face_files(tensors: Sequence[Tensor], max_shard_bytes: int) -> tuple[list[File], Mapping[str, bytes]]:
    """The weights of a Hugging Face folder in files of at most so many bytes, and the index of several.

    A tensor that is larger gets its own file.
    """
    shards: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    if len(shards) == 1:
        return [safetensors_file(f"{WEIGHTS}.safetensors", tensors)], {}
    names = [f"{WEIGHTS}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)}, "weight_map": weight_map}
    files = [safetensors_file(name, shard) for name, shard in zip(names, shards, strict=True)]
    return files, {INDEX: (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()}


#: So often the disk is made to begin with what was written.
_FLUSH_BYTES = 32 << 20


def stream_file(
    storage: Storage,
    path: str,
    file: File,
    read: Callable[[Tensor], Iterable[memoryview]],
    done: Callable[[int], object] = lambda nbytes: None,
    checksum: Stream | None = None,
) -> None:
    """Write a file that must not exist yet, and make it durable.

    Args:
        storage: the storage
        path: where
        file: what is in it
        read: gives the bytes of a tensor in blocks, such as `tensor_bytes_of`
        done: called with the number of bytes of tensors that were written
        checksum: takes all bytes of the file

    Raises:
        CheckpointCorruptError: the checkpoint is damaged
        OSError: from the storage
    """
    flushed = position = 0
    fd = storage.create(path, file.size)
    try:
        for data, is_tensor in _bytes_of(file, read):
            # A storage that streams reads the memory later, and blocks are valid until the next one.
            piece = memoryview(bytes(data)) if storage.streams else data
            storage.write(fd, [piece], position)
            position += len(piece)
            if checksum is not None:
                checksum.update(piece)
            if is_tensor:
                done(len(piece))
            if position - flushed >= _FLUSH_BYTES:
                storage.start_writeback(fd, flushed, position - flushed)
                flushed = position
        storage.sync(fd)
        storage.drop_cached(fd)
    finally:
        storage.close(fd)


def tensor_bytes_of(blocks: TensorBlocks, tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor as the export has them, in blocks that are valid until the next one.

    Raises:
        CheckpointCorruptError: the stored bytes are damaged; this may come after the last block
    """
    cast = caster(tensor.entry.dtype, tensor.dtype)
    for block in blocks.of(tensor.entry):
        yield block if cast is None else cast(block)


def _bytes_of(file: File, read: Callable[[Tensor], Iterable[memoryview]]) -> Iterator[tuple[memoryview, bool]]:
    """The bytes of a file from its beginning to its end, and whether they are of a tensor."""
    pieces: list[tuple[int, bytes | Tensor]] = [
        *file.constants,
        *((position, tensor) for tensor, position in file.places),
    ]
    for _, piece in sorted(pieces, key=lambda entry: entry[0]):
        if isinstance(piece, bytes):
            yield memoryview(piece), False
        else:
            for block in read(piece):
                yield block, True
