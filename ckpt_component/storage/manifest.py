"""The manifest: the last file of a checkpoint, and the witness that it is complete.

It lists every file with its size, and a CRC for the small ones. The data files' CRCs are per item and stand in
`integrity-<rank>.json`, whose own CRC is in the manifest. It also carries a CRC of itself, so a copy that was cut
short is noticed. A checkpoint is committed when its folder has its final name and its manifest verifies.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointCorruptError
from .fs import FsOps
from .names import MANIFEST

VERSION = 1
_MAX_BYTES = 64 << 20


def encode_manifest(content: Mapping[str, Any]) -> bytes:
    """The bytes of `manifest.json`: the content and the CRC-32 of its canonical form."""
    body = _canonical(content)
    return b'{"crc32":%d,"manifest":%s}\n' % (zlib.crc32(body), body)


def decode_manifest(data: bytes, path: str) -> dict[str, Any]:
    """The content of a manifest; raises CheckpointCorruptError when it is not what was written."""
    try:
        outer = json.loads(data)
        content, crc = outer["manifest"], outer["crc32"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointCorruptError(f"{path} is not a complete manifest ({error}).") from error
    if zlib.crc32(_canonical(content)) != crc:
        raise CheckpointCorruptError(f"{path} does not match its own checksum.")
    if content.get("version") != VERSION:
        raise CheckpointCorruptError(
            f"{path} has version {content.get('version')!r}, and this release reads version {VERSION}."
        )
    return dict(content)


def read_manifest(fs: FsOps, folder: str) -> dict[str, Any] | None:
    """The verified manifest of a checkpoint folder, or None where there is none (a foreign checkpoint)."""
    path = os.path.join(folder, MANIFEST)
    try:
        data = fs.read(path, _MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointCorruptError(f"{path} cannot be read: {error}.") from error
    return decode_manifest(data, path)


def check_files(fs: FsOps, folder: str, manifest: Mapping[str, Any]) -> None:
    """Compare the size of every file with the manifest; cheap, reads no data."""
    for entry in manifest["files"]:
        path = os.path.join(folder, entry["name"])
        size = fs.size(path)
        if size is None:
            raise CheckpointCorruptError(f"{path} is missing; the manifest lists it with {entry['size']} bytes.")
        if size != entry["size"]:
            raise CheckpointCorruptError(f"{path} has {size} bytes; it was written with {entry['size']}.")


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
