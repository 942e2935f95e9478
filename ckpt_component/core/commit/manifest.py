"""The manifest: the last file written to a checkpoint, which shows that it is complete.

It lists every file with its size, and a CRC for the small ones. The CRCs of the data files are per item and stored in
`integrity-<rank>.json`, whose CRC is in the manifest. The manifest has a CRC of itself too, which detects truncated
copies. A checkpoint is committed when its folder has its final name and its manifest verifies. Its files are next to
the manifest, or, where checkpoints are committed without a rename, in the attempt's folder that it names (`at`).

If each host has its own folder, the manifest says which files are in which (`hosts`: for each host the names of
its files), and each folder has the manifest. So what one of them has is known to be a part of a checkpoint, no damage.


The parts of a checkpoint over the folders of several hosts: each has the manifest, and its own files alone.

A host that was away while its step was saved again comes back with the manifest of the attempt before. So where hosts
have folders of their own, a step may have several manifests, and the one that counts has all its files.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ...errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointLoadError,
    CheckpointPartError,
    CheckpointTypeError,
    CheckpointUnreadableError,
)
from ..storage.locate import with_those_above
from ..storage.safe_open import is_plain_name, read_failure
from ..storage.storage import Storage
from .names import MANIFEST, is_token

#: JSON has no numbers for these, so they are strings in a manifest.
_NOT_FINITE = ("nan", "inf", "-inf")


def encode_metrics(metrics: Mapping[str, Any]) -> dict[str, float | str]:
    """Convert metrics to JSON values.

    Args:
        metrics: numbers by name; a number is anything that `float` converts and that is not text, such as a tensor
            of one element

    Raises:
        CheckpointTypeError: they are not numbers by name; the text says which is none
    """
    if not isinstance(metrics, Mapping):
        raise CheckpointTypeError(
            f"metrics is {metrics!r:.100}, a {type(metrics).__name__}; pass numbers by name: metrics={{'loss': 0.5}}."
        )
    encoded: dict[str, float | str] = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise CheckpointTypeError(
                f"metrics has the name {name!r:.100}; names are strings: metrics={{'loss': 0.5}}."
            )
        try:
            # `float` of a tensor that requires a gradient warns.
            plain = value.item() if hasattr(value, "item") else value
            number = None if isinstance(plain, (str, bytes, bytearray)) else float(plain)
        except Exception:  # a tensor of several elements, a complex number, and what else users have
            number = None
        if number is None:
            shape = getattr(value, "shape", None)
            text = f"{value!r:.100}, a {type(value).__name__}" if shape is None else f"of shape {tuple(shape)}"
            raise CheckpointTypeError(f"metrics[{name!r}] is {text} and not one number; pass float(value).")
        encoded[name] = number if math.isfinite(number) else str(number)
    return encoded


def metrics_of(manifest: Mapping[str, Any], path: str) -> dict[str, float]:
    """The metrics in a manifest; none in that of an older release.

    Args:
        manifest: content of the manifest
        path: the checkpoint, for the error

    Raises:
        CheckpointCorruptError: they are not numbers by name
    """
    stored = manifest.get("metrics", {})
    if not isinstance(stored, dict):
        raise CheckpointCorruptError(f"{path} gives {stored!r:.200} as metrics.")
    for name, value in stored.items():
        if type(value) not in (int, float) and value not in _NOT_FINITE:
            raise CheckpointCorruptError(f"{path} gives {value!r:.200} as the metric {name!r:.200}.")
    return {name: float(value) for name, value in stored.items()}


VERSION = 1
#: Larger than any manifest.
MAX_BYTES = 64 << 20


def encode_manifest(content: Mapping[str, Any]) -> bytes:
    """Encode `manifest.json`: the content and the CRC-32 of its canonical form."""
    body = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return b'{"crc32":%d,"manifest":%s}\n' % (zlib.crc32(body), body)


def decode_manifest(data: bytes, path: str) -> dict[str, Any]:
    """Decode a manifest and validate its values.

    A matching checksum does not make the values valid, so every number and name that is used later is checked.

    Raises:
        CheckpointCorruptError: the manifest is damaged or has invalid values
        CheckpointLoadError: another release wrote it, in a version that this one does not support
    """
    try:
        outer = json.loads(data)
        content, crc = outer["manifest"], outer["crc32"]
        body = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    except KeyError as error:
        raise CheckpointCorruptError(f"{path} is not a complete manifest (it has no {error}).") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointCorruptError(f"{path} is not a complete manifest ({error}).") from error
    if zlib.crc32(body) != crc:
        raise CheckpointCorruptError(f"{path} does not match its own checksum.")
    if not isinstance(content, dict):
        raise CheckpointCorruptError(f"{path} holds a {type(content).__name__}, not a manifest.")
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
    # Loops run over the ranks, each of which has at least its own file.
    if content["world_size"] > max(len(files), 1):
        raise CheckpointCorruptError(
            f"{path} gives {content['world_size']} as the world_size, and lists only {len(files)} files."
        )
    if "at" in content and not is_token(content["at"]):
        raise CheckpointCorruptError(f"{path} names {content['at']!r:.200} as the folder of its files.")
    if "hosts" in content and not _are_of_hosts(content["hosts"], names):
        raise CheckpointCorruptError(f"{path} gives {content['hosts']!r:.200} as the files of each host.")
    return content


def _are_of_hosts(hosts: object, names: Collection[object]) -> bool:
    """Whether this says which of these files are on which host."""
    return isinstance(hosts, dict) and all(
        isinstance(files, list) and all(isinstance(name, str) and name in names for name in files)
        for files in hosts.values()
    )


def read_manifest(storage: Storage, folder: str) -> dict[str, Any] | None:
    """Read and verify the manifest of a checkpoint folder; None if there is none (a foreign checkpoint).

    Raises:
        CheckpointCorruptError: the manifest is damaged
        CheckpointUnreadableError: the manifest exists but cannot be read
        CheckpointLoadError: another release wrote it
    """
    path = os.path.join(folder, MANIFEST)
    try:
        data = storage.read(path, MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise read_failure(path, error) from error
    return decode_manifest(data, path)


def checkpoint_around(storage: Storage, path: str) -> str | None:
    """The checkpoint that a path is, or is in, however it is spelled; None: it is in none that can be read."""
    for folder in with_those_above(path):
        with contextlib.suppress(CheckpointError):  # another program's manifest.json
            if read_manifest(storage, folder) is not None:
                return folder
    return None


def data_folder(storage: Storage, folder: str, manifest: Mapping[str, Any]) -> str:
    """The folder of a checkpoint's files: its own, or the subfolder that its manifest names, which may not be a link.

    Raises:
        CheckpointCorruptError: there is no such folder
        CheckpointPartError: there is none here, and other hosts have their own
        CheckpointUnreadableError: the folder cannot be examined
    """
    if "at" not in manifest:
        return folder
    path = os.path.join(folder, manifest["at"])
    try:
        is_folder = storage.is_real_folder(path)
        is_elsewhere = not is_folder and "hosts" in manifest and not storage.exists(path)
    except OSError as error:
        raise read_failure(path, error) from error
    if is_elsewhere:
        raise _part(path, manifest["hosts"])
    if not is_folder:
        raise CheckpointCorruptError(f"{path} is missing or not a folder; manifest.json says that the files are in it.")
    return path


def hosts_missing(manifest: Mapping[str, Any], missing: set[str]) -> dict[str, list[str]]:
    """The hosts none of whose files are here, and their files; `missing`: the files that are not here."""
    hosts: Mapping[str, list[str]] = manifest.get("hosts", {})
    return {host: files for host, files in hosts.items() if files and missing.issuperset(files)}


def check_files(storage: Storage, folder: str, manifest: Mapping[str, Any]) -> None:
    """Compare the size of every file in a `data_folder` with the manifest. Cheap: reads no data.

    Raises:
        CheckpointCorruptError: a file is missing, or has another size
        CheckpointPartError: no file of some hosts is here, and those of the others are as they are to be
        CheckpointUnreadableError: the files cannot be examined
    """
    try:
        sizes = storage.sizes(folder, [entry["name"] for entry in manifest["files"]])
        names = [name for name, size in sizes.items() if size is None]
        if "hosts" not in manifest:
            del names[1:]  # one is enough to say that something is missing, and each is a question to the storage
        no_files = {name: storage.exists(os.path.join(folder, name)) for name in names}
    except OSError as error:
        raise read_failure(str(error.filename or folder), error) from error
    missing, elsewhere = dict[str, list[str]](), set[str]()
    if "hosts" in manifest:
        missing = hosts_missing(manifest, {name for name, is_other in no_files.items() if not is_other})
        elsewhere.update(*missing.values())
    for entry in manifest["files"]:
        path, size = os.path.join(folder, entry["name"]), sizes[entry["name"]]
        if entry["name"] in elsewhere:
            continue
        if no_files.get(entry["name"]):
            raise CheckpointCorruptError(f"{path} is not a regular file (a link, a folder, a FIFO or a device).")
        if size is None:
            raise CheckpointCorruptError(f"{path} is missing; manifest.json lists it with {entry['size']} bytes.")
        if size != entry["size"]:
            raise CheckpointCorruptError(f"{path} has {size} bytes; manifest.json lists it with {entry['size']}.")
    if missing:
        raise _part(folder, missing)


def _part(folder: str, missing: Collection[str]) -> CheckpointPartError:
    hosts = ("host " if len(missing) == 1 else "hosts ") + ", ".join(sorted(missing))
    return CheckpointPartError(
        f"{folder} is a part of a checkpoint: each host has its own files in checkpoint.local.dir, and those of "
        f"{hosts} are not here."
    )


def hosts_of(manifest: Mapping[str, Any]) -> Mapping[str, Sequence[str]]:
    """The names of each host's files; empty for a checkpoint in a single folder."""
    hosts: Mapping[str, Sequence[str]] = manifest.get("hosts", {})
    return hosts


def part_of(manifest: Mapping[str, Any], host: str) -> Mapping[str, Any]:
    """The manifest as if there were only the files of one host; itself, if the checkpoint is in a single folder."""
    if "hosts" not in manifest:
        return manifest
    names = {*hosts_of(manifest).get(host, ())}
    files = [entry for entry in manifest["files"] if entry["name"] in names]
    return {**{name: value for name, value in manifest.items() if name != "hosts"}, "files": files}


def manifests_of(storage: Storage, folder: str) -> Iterator[Mapping[str, Any]]:
    """The manifests that hosts have of a checkpoint, one of each attempt, that of this host first.

    Args:
        storage: the storage
        folder: of the checkpoint

    Raises:
        CheckpointUnreadableError: a host cannot be asked
    """
    path, attempts = os.path.join(folder, MANIFEST), set[str]()
    try:
        for data in storage.versions(path, MAX_BYTES):
            with contextlib.suppress(CheckpointError):  # what is damaged on one host says nothing of the others
                manifest = decode_manifest(data, path)
                if manifest.get("attempt") not in attempts:
                    attempts.add(str(manifest.get("attempt")))
                    yield manifest
    except FileNotFoundError:
        return
    except OSError as error:
        raise read_failure(path, error) from error


def manifest_of_attempt(storage: Storage, folder: str, attempt: str) -> Mapping[str, Any]:
    """The manifest of the attempt that the leading rank has found. Raises CheckpointUnreadableError: no host has it."""
    for manifest in manifests_of(storage, folder):
        if manifest.get("attempt") == attempt:
            return manifest
    raise CheckpointUnreadableError(
        f"{folder} is not the checkpoint that the leading rank has found there (its manifest has the attempt "
        f"{attempt}); the host that has it is gone, so start the run again."
    )


def whole_manifest(storage: Storage, folder: str, manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """The manifest that counts, all of whose files are there: that of this host, or that of another attempt.

    Args:
        storage: the storage
        folder: of the checkpoint
        manifest: that of this host

    Raises:
        CheckpointCorruptError: no host has one; why that of this host is not whole, see `check_files`
        CheckpointUnreadableError: a host cannot be asked
    """
    try:
        check_files(storage, data_folder(storage, folder, manifest), manifest)
        return manifest
    except CheckpointCorruptError:
        for other in manifests_of(storage, folder) if storage.hosts else ():
            with contextlib.suppress(CheckpointCorruptError):  # the error of this host's manifest is raised
                if other.get("attempt") != manifest.get("attempt"):
                    check_files(storage, data_folder(storage, folder, other), other)
                    return other
        raise
