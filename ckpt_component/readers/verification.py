"""Verify a whole checkpoint without loading it."""

from __future__ import annotations

import os
import zlib

from ..catalogue.rank_index import read_rank_indexes
from ..errors import CheckpointCorruptError
from ..storage.fs import FsOps
from ..storage.manifest import check_files, data_folder, read_manifest
from ..storage.safe_open import read_failure
from .own_format import verify_file


def verify_checkpoint(fs: FsOps, path: str) -> bool:
    """Read every file of a checkpoint of ours, of any format, and compare its checksums.

    Args:
        fs: the file system.
        path: folder of the checkpoint.

    Returns:
        False if it has no checksums, because another program saved it.

    Raises:
        CheckpointCorruptError: a file is missing, cannot be read, or differs from what was written; names the file.
    """
    manifest = read_manifest(fs, path)
    if manifest is None:
        return False
    folder = data_folder(path, manifest)
    check_files(fs, folder, manifest)
    for index in read_rank_indexes(fs, folder, manifest):  # verifies the integrity files
        for name in dict.fromkeys([*index.tensors.names, *(item.file for item in index.extras)]):
            verify_file(folder, name, index)
    for entry in manifest["files"]:
        if "crc32" in entry:
            file = os.path.join(folder, entry["name"])
            try:
                data = fs.read(file, entry["size"])
            except OSError as error:
                raise read_failure(file, error) from error
            if zlib.crc32(data) != entry["crc32"]:
                raise CheckpointCorruptError(f"{file} does not match its checksum in manifest.json.")
    return True
