"""`.metadata` of stock DCP, unpickled without letting it call anything but the classes it is made of."""

from __future__ import annotations

import io
import pathlib
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from ..errors import CheckpointCorruptError

_CLASSES = {
    ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): dict,
}
#: DCP notes the checkpoint's path as a pathlib object; text is enough.
_PATH_CLASSES = {
    (module, name)
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
}


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Exact names only; a dotted name would reach into objects."""
        found = _CLASSES.get((module, name))
        if found is not None:
            return found
        if (module, name) in _PATH_CLASSES:
            return pathlib.PurePosixPath
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        """Nothing outside the pickle is ever meant."""
        raise pickle.UnpicklingError("it refers to an outside object")


def load_metadata(data: bytes, where: str) -> metadata.Metadata:
    """The metadata of a DCP checkpoint.

    Raises:
        CheckpointCorruptError: it is damaged, or holds what `.metadata` has no business to hold.
    """
    try:
        found = _Restricted(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise CheckpointCorruptError(f"{where} is not a DCP metadata file that can be trusted: {error}.") from error
    if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
        raise CheckpointCorruptError(f"{where} is not a DCP metadata file.")
    return found
