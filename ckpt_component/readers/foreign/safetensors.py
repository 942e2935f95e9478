"""Safetensors files of other libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...catalogue.safetensors import safetensors_index
from ..own_format import OwnSource


class SafetensorsSource(OwnSource):
    """Safetensors files: read as our own, through an index built from their headers, without checksums.

    Args:
        where: The checkpoint's path, for messages.
        folder: The folder of the files.
        names: Their names.
        shared: As for `FileSet`.
        weight_map: As for `safetensors_index`.

    Raises:
        CheckpointCorruptError, CheckpointUnreadableError, CheckpointLoadError: See `safetensors_index`.
    """

    def __init__(
        self,
        where: str,
        folder: str,
        names: Sequence[str],
        *,
        shared: bool = True,
        weight_map: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder, [safetensors_index(where, folder, names, weight_map)], verify=False, shared=shared)
        self.where = where
