"""Safetensors files of other libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...core.formats.safetensors import safetensors_index
from ...core.storage.storage import Storage
from ..own_format import OwnSource


class SafetensorsSource(OwnSource):
    """Safetensors files: read as our own, through an index built from their headers, without checksums.

    Args:
        fs: The storage.
        where: The checkpoint's path, for messages.
        folder: The folder of the files.
        names: Their names.
        shared: As for `Storage.open_files`.
        weight_map: As for `safetensors_index`.

    Raises:
        CheckpointCorruptError, CheckpointUnreadableError, CheckpointLoadError: See `safetensors_index`.
    """

    def __init__(
        self,
        fs: Storage,
        where: str,
        folder: str,
        names: Sequence[str],
        *,
        shared: bool = True,
        weight_map: Mapping[str, str] | None = None,
    ) -> None:
        index = safetensors_index(fs, where, folder, names, weight_map)
        super().__init__(fs, folder, [index], verify=False, shared=shared)
        self.where = where
