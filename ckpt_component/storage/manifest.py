"""The manifest: the last file of a checkpoint, and the witness that it is complete.

It lists every file with its size, and a CRC for the small ones. The data files' CRCs are per item and stand in
`integrity-<rank>.json`, whose own CRC is in the manifest. It also carries a CRC of itself, so a copy that was cut
short is noticed. A checkpoint is committed when its folder has its final name and its manifest verifies. Its files are
beside the manifest; or, where the manifest alone makes the commit, in the folder of the attempt that it names (`at`).
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointCorruptError, CheckpointLoadError
from .fs import FsOps
from .names import MANIFEST, is_token
from .safe_open import is_plain_name, read_failure

VERSION = 1
#: More than any manifest has.
MAX_BYTES = 64 << 20


def encode_manifest(content: Mapping[str, Any]) -> bytes:
    """The bytes of `manifest.json`: the content and the CRC-32 of its canonical form."""
    body = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return b'{"crc32":%d,"manifest":%s}\n' % (zlib.crc32(body), body)


def decode_manifest(data: bytes, path: str) -> dict[str, Any]:
    """The content of a manifest, checked value by value.

    A checksum can be right for values that are not, so what is used later as number or name must be one.

    Raises:
        CheckpointCorruptError: it is not what was written, or no writer would have written it.
        CheckpointLoadError: another release wrote it, in a form that this one does not know.
    """
    try:
        outer = json.loads(data)
        content, crc = outer["manifest"], outer["crc32"]
        body = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointCorruptError(f"{path} is not a complete manifest ({error}).") from error
    if zlib.crc32(body) != crc:
        raise CheckpointCorruptError(f"{path} does not match its own checksum.")
    if not isinstance(content, dict):
        raise CheckpointCorruptError(f"{path} holds a {type(content).__name__} and no manifest.")
    if content.get("version") != VERSION:
        raise CheckpointLoadError(
            f"{path} has version {content.get('version')!r}, and this release of ckpt_component reads version "
            f"{VERSION}; load it with the release that wrote it."
        )
    files, names = content.get("files"), set()
    counts = {"world_size": content.get("world_size")}
    if not isinstance(files, list):
        raise CheckpointCorruptError(f"{path} lists no files.")
    for entry in files:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not is_plain_name(name):
            raise CheckpointCorruptError(f"{path} lists a file named {name!r:.200}, which is not a plain name.")
        if name in names:
            raise CheckpointCorruptError(f"{path} lists {name} twice.")
        names.add(name)
        counts[f"size of {name}"], counts[f"crc32 of {name}"] = entry.get("size"), entry.get("crc32", 0)
    for what, count in counts.items():
        least = 1 if what == "world_size" else 0
        if type(count) is not int or not least <= count < 1 << 63:  # a bool is an int too
            raise CheckpointCorruptError(f"{path} gives {count!r:.200} as the {what}.")
    if "at" in content and not is_token(content["at"]):
        raise CheckpointCorruptError(f"{path} names {content['at']!r:.200} as the folder of its files.")
    return content


def read_manifest(fs: FsOps, folder: str) -> dict[str, Any] | None:
    """The verified manifest of a checkpoint folder, or None where there is none (a foreign checkpoint).

    Raises:
        CheckpointCorruptError: it is not what was written.
        CheckpointUnreadableError: it is there, and cannot be read.
        CheckpointLoadError: another release wrote it.
    """
    path = os.path.join(folder, MANIFEST)
    try:
        data = fs.read(path, MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise read_failure(path, error) from error
    return decode_manifest(data, path)


def data_folder(folder: str, manifest: Mapping[str, Any]) -> str:
    """Where the files of a checkpoint are: its folder, or the one in it that its manifest names. Not through a link.

    Raises:
        CheckpointCorruptError: there is no such folder.
        CheckpointUnreadableError: it cannot be looked at.
    """
    if "at" not in manifest:
        return folder
    path = os.path.join(folder, manifest["at"])
    try:
        status = os.lstat(path)
    except OSError as error:
        raise read_failure(path, error) from error
    if not stat.S_ISDIR(status.st_mode):
        raise CheckpointCorruptError(f"{path} is no folder, and manifest.json says that the files are in it.")
    return path


def check_files(fs: FsOps, folder: str, manifest: Mapping[str, Any]) -> None:
    """Compare the size of every file in a `data_folder` with the manifest; cheap, reads no data."""
    for entry in manifest["files"]:
        path = os.path.join(folder, entry["name"])
        try:
            size = fs.size(path)
        except OSError as error:
            raise read_failure(path, error) from error
        if size is None and os.path.lexists(path):
            raise CheckpointCorruptError(f"{path} is no regular file (a link, a folder, a FIFO or a device).")
        if size is None:
            raise CheckpointCorruptError(f"{path} is missing; manifest.json lists it with {entry['size']} bytes.")
        if size != entry["size"]:
            raise CheckpointCorruptError(f"{path} has {size} bytes; manifest.json lists it with {entry['size']}.")
