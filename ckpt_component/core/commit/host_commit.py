"""Commit where each host has a folder of its own: like the creation of a manifest, on the host of the leading rank.

Each rank writes into the attempt's folder of its host, which it makes itself. The manifest says which host has which
files. It is created on the host of the leading rank, which is the commit, and then put on the other hosts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..storage.host_folders import HostFolders
from .manifest import read_manifest
from .manifest_commit import ManifestCommit
from .protocol import Attempt


class HostCommit(ManifestCommit):
    """See the top of this file.

    Args:
        storage: the folders of all hosts
    """

    storage: HostFolders

    def __init__(self, storage: HostFolders) -> None:
        super().__init__(storage)

    def attempt(self, target: str, token: str, owner: str = "", file: str = "") -> Attempt:
        """A new attempt, which a writer process finds in the folder of its host."""
        return HostAttempt(self, target, token, self.staging(target, token), owner, file)

    def refuse_taken(self, target: str, file: str = "") -> None:
        """See the base class. Asks no other host, as each save calls it: what was committed has its manifest here."""
        ManifestCommit(self.storage.fs).refuse_taken(self.storage.here(target), file)

    def join(self, attempt: Attempt, seconds: float) -> None:
        """Make the attempt's folder on this host, and on that of the leading rank wait for it."""
        storage = self.storage
        if storage.leads:
            super().join(attempt, seconds)
            return
        for path in (attempt.target, attempt.staging):  # not the root, if it vanished
            with contextlib.suppress(FileExistsError):  # another rank of this host was first
                storage.make_folder(path)
            storage.sync_folder(os.path.dirname(path))

    def manifest_fields(
        self, attempt: Attempt, ranks: Sequence[Mapping[str, Any]], sidecars: Collection[str]
    ) -> Mapping[str, Any]:
        names, hosts = self.storage.hosts, dict[str, list[str]]()
        for rank in ranks:
            hosts.setdefault(names[rank["rank"]], []).extend(entry["name"] for entry in rank["files"])
        hosts[names[0]].extend(sidecars)
        return {**super().manifest_fields(attempt, ranks, sidecars), "hosts": hosts}

    def _committed_token(self, target: str) -> str | None:
        """See the base class: the manifest on this host says so, whether or not others can be asked."""
        manifest = read_manifest(self.storage.fs, self.storage.here(target))
        return None if manifest is None else str(manifest.get("attempt"))


class HostAttempt(Attempt):
    """An attempt whose folder has another path on each host."""

    protocol: HostCommit

    def to_plain(self) -> dict[str, str]:
        """See the base class; with the paths on this host."""
        here = self.protocol.storage.here
        return {**super().to_plain(), "target": here(self.target), "staging": here(self.staging)}
