"""`CachedMetadataFileSystemReader`: reads the `.metadata` of a folder once, and again when the file has changed."""

from __future__ import annotations

import functools
import os
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from .bucket_io import METADATA

#: Number of folders whose metadata is cached; that of a large model can exceed 100 MB.
_KEPT = 2


class CachedMetadataFileSystemReader(FileSystemReader):
    """torch's reader, with metadata shared by all readers of a folder.

    The reference keeps stale metadata when a folder is saved again; this class compares time, size and inode of the
    file on each use.

    Args:
        path: folder of the checkpoint
        cache_metadata: False: read the file each time
    """

    def __init__(self, path: str | os.PathLike[str], cache_metadata: bool = True) -> None:
        super().__init__(path)
        self._cache_metadata = cache_metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the checkpoint. The object is shared; do not modify it.

        Raises:
            FileNotFoundError: there is no checkpoint in the folder
        """
        if not self._cache_metadata:
            return super().read_metadata(*args, **kwargs)
        folder = os.path.abspath(os.fspath(self.path))
        file = os.stat(os.path.join(folder, METADATA))
        return _metadata_of(folder, file.st_mtime_ns, file.st_size, file.st_ino)

    @classmethod
    def clear_metadata_cache(cls, path: str | os.PathLike[str] | None = None) -> None:
        """Empty the cache.

        Args:
            path: as in the reference; the cache is emptied for all folders
        """
        _metadata_of.cache_clear()


@functools.lru_cache(maxsize=_KEPT)
def _metadata_of(folder: str, *_identity: int) -> Metadata:
    return FileSystemReader(folder).read_metadata()
