"""Forged checkpoints: valid checksums around values that no writer would have written."""

from __future__ import annotations

import json
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_component.core.commit.manifest import encode_manifest


class Malicious:
    """Makes the folder `marker` when it is unpickled by anybody who calls what a pickle names."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def edit_metadata(folder: Path, change: Callable[[Any], Any]) -> None:
    """Change `.metadata` of stock DCP; `change` gets the real object, and may return another one."""
    path = folder / ".metadata"
    found = pickle.loads(path.read_bytes())  # our own test's file
    path.write_bytes(pickle.dumps(change(found) or found))


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest, and make its checksum right."""
    content = json.loads((folder / "manifest.json").read_bytes())["manifest"]
    (folder / "manifest.json").write_bytes(encode_manifest(change(content) or content))


def edit_table(folder: Path, change: Callable[[dict[str, Any]], Any], rank: int = 0) -> None:
    """Change an integrity table, and make size and checksum in the manifest right."""
    name = f"integrity-{rank}.json"
    content = json.loads((folder / name).read_bytes())
    data = json.dumps(change(content) or content).encode()
    (folder / name).write_bytes(data)
    edit_manifest(folder, lambda manifest: _note(manifest, name, data))


def note_file(folder: Path, name: str) -> None:
    """Make size and checksum of a changed file right in the manifest."""
    data = (folder / name).read_bytes()
    edit_manifest(folder, lambda manifest: _note(manifest, name, data))


def _note(manifest: dict[str, Any], name: str, data: bytes) -> None:
    for entry in manifest["files"]:
        if entry["name"] == name:
            entry["size"] = len(data)
            if "crc32" in entry:
                entry["crc32"] = zlib.crc32(data)
