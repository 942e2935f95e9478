"""The parts of a checkpoint over the folders of several hosts: each has the manifest, and its own files alone.

A host that was away while its step was saved anew comes back with the manifest of the attempt before. So where hosts
have folders of their own, a step may have several manifests, and the one that counts has all its files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...errors import CheckpointCorruptError, CheckpointError, CheckpointUnreadableError
from ..storage.safe_open import read_failure
from ..storage.storage import Storage
from .manifest import MAX_BYTES, check_files, data_folder, decode_manifest
from .names import MANIFEST


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
