"""Folders and files of other programs: which format they have, and which files are the checkpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from ...core.formats.folder import INDEX, MEGATRON_MARKER, METADATA, weights_in
from ...core.formats.safetensors import shards_of
from ...core.storage.locate import absolute
from ...core.storage.safe_open import place_of
from ...core.storage.storage import Storage
from ..source import Source
from .safetensors import SafetensorsSource
from .torch_file import TorchFileSource

logger = logging.getLogger("ckpt_component.readers")


def open_folder(
    fs: Storage, folder: str, names: Sequence[str], *, mapped: bool, verify: bool, shared: bool
) -> Source | None:
    """Open the checkpoint of another program in a folder with these names; None if there is none.

    Args:
        fs: The storage.
        folder: The folder.
        names: The names in it.
        mapped: As for `TorchFileSource`.
        verify: As for `TorchFileSource`.
        shared: As for `Storage.open_files`.
    """
    if METADATA in names:
        from .dcp import StockDcpSource  # few loads need DCP, which takes a second to import
        from .megatron import open_megatron

        if MEGATRON_MARKER in names:
            return open_megatron(fs, folder, names, shared=shared)
        return StockDcpSource(fs, folder, shared=shared)
    name = weights_in(names)
    if name is None:
        return None
    path = os.path.join(folder, name)
    if len(names) > 1:
        logger.info("loading %s", path)
    if not name.endswith(INDEX):
        return open_file(fs, path, mapped=mapped, verify=verify, shared=shared)
    base, shards, weight_map = shards_of(fs, folder, name)
    return SafetensorsSource(fs, folder, base, shards, shared=shared, weight_map=weight_map)


def open_file(fs: Storage, path: str, *, mapped: bool, verify: bool, shared: bool) -> Source:
    """Open a file of safetensors or `torch.save`."""
    folder, name = place_of(*os.path.split(absolute(path)))
    if path.endswith(".safetensors"):
        return SafetensorsSource(fs, path, folder, [name], shared=shared)
    return TorchFileSource(fs, os.path.join(folder, name), mapped=mapped, verify=verify)
