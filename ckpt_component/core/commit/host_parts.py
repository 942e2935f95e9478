"""The parts of a checkpoint over the folders of several hosts: each has the manifest, and its own files alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


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
