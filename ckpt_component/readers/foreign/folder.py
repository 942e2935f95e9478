"""Folders and files of other programs: which format they have, and which files are the checkpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from ...errors import CheckpointCorruptError
from ...storage.fs import FsOps
from ...storage.names import SINGLE_FILES
from ...storage.safe_open import place_of
from ..source import Source
from .safetensors import SafetensorsSource, read_weight_map
from .torch_file import TorchFileSource

logger = logging.getLogger(__name__)

_INDEX = ".safetensors.index.json"
#: Hugging Face's names of the weights, which other files may lie beside.
_WEIGHTS = ("model.safetensors", f"model{_INDEX}", "pytorch_model.bin")


def is_readable(names: Sequence[str]) -> bool:
    """Whether a folder of another program with these names holds one checkpoint of a supported format."""
    return ".metadata" in names or _weights_in(names) is not None


def open_folder(
    fs: FsOps, folder: str, names: Sequence[str], *, mapped: bool, verify: bool, shared: bool
) -> Source | None:
    """Open the checkpoint of another program in a folder with these names; None if there is none.

    Args:
        fs: File system to read small files with.
        folder: The folder.
        names: The names in it.
        mapped: As for `TorchFileSource`.
        verify: As for `TorchFileSource`.
        shared: As for `FileSet`.
    """
    if ".metadata" in names:
        from .dcp import StockDcpSource  # few loads need DCP, which takes a second to import
        from .megatron import MARKER, open_megatron

        if MARKER in names:
            return open_megatron(fs, folder, names, shared=shared)
        return StockDcpSource(fs, folder, shared=shared)
    name = _weights_in(names)
    if name is None:
        return None
    path = os.path.join(folder, name)
    if len(names) > 1:
        logger.info("loading %s", path)
    if not name.endswith(_INDEX):
        return open_file(path, mapped=mapped, verify=verify, shared=shared)
    weight_map = read_weight_map(fs, os.path.join(*place_of(folder, name)))
    places = {shard: place_of(folder, shard) for shard in dict.fromkeys(weight_map.values())}
    (base, *others) = dict.fromkeys(place for place, _ in places.values())
    if others:
        raise CheckpointCorruptError(f"{folder} has some of its files in {base} and some in {others[0]}.")
    weight_map = {key: places[shard][1] for key, shard in weight_map.items()}
    shards = [shard for _, shard in places.values()]
    return SafetensorsSource(folder, base, shards, shared=shared, weight_map=weight_map)


def open_file(path: str, *, mapped: bool, verify: bool, shared: bool) -> Source:
    """Open a file of safetensors or `torch.save`."""
    folder, name = place_of(*os.path.split(os.path.abspath(path)))
    if path.endswith(".safetensors"):
        return SafetensorsSource(path, folder, [name], shared=shared)
    return TorchFileSource(os.path.join(folder, name), mapped=mapped, verify=verify)


def _weights_in(names: Sequence[str]) -> str | None:
    """The file to load from a folder with these names, or the index of several; None if there is none or no one."""
    for usual in _WEIGHTS:
        if usual in names:
            return usual
    for endings in (_INDEX, SINGLE_FILES[:1], SINGLE_FILES[1:]):
        fitting = [name for name in names if name.endswith(endings)]
        if fitting:
            return fitting[0] if len(fitting) == 1 else None
    return None
