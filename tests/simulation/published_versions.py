"""What is published, read by code of its own: safetensors, deltas and manifests, as their formats say and no more."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
import zstandard

from ckpt_component.testing import Disk, DiskFolder, SimulatedObjects

INDEX = "model.safetensors.index.json"
STATE = ".ckpt-version.json"
_VERSION = "weight_v"
#: What is beside the files of a version.
_OURS = ("manifest.json", ".ckpt-folder")


@dataclass(frozen=True)
class ListedVersion:
    """A version that is committed: its manifest, and its files."""

    number: int
    manifest: Mapping[str, Any]
    files: Mapping[str, bytes]

    @property
    def base(self) -> int | None:
        base = self.manifest["weights"].get("base")
        return None if base is None else int(base)

    @property
    def attempt(self) -> str:
        return str(self.manifest["attempt"])


class PublishedVersions(dict[int, ListedVersion]):
    """The committed versions in a folder or bucket, by number."""

    def __init__(self, disk: Disk | SimulatedObjects, root: str) -> None:
        self._weights: dict[int, dict[str, bytes]] = {}
        paths = [path for path in disk.walk(root)] if is_there(disk, root) else []
        for path in paths:
            folder, name = os.path.split(path)
            if name == "manifest.json" and os.path.basename(folder).startswith(_VERSION):
                manifest = json.loads(bytes(disk.file(path).data))["manifest"]
                data = os.path.join(folder, manifest.get("at", ""))
                number = int(os.path.basename(folder).removeprefix(_VERSION))
                self[number] = ListedVersion(number, manifest, files_in(disk, data.rstrip("/")))

    def weights(self, number: int) -> dict[str, bytes]:
        """The weights of a version, from what is here alone."""
        if number not in self._weights:
            version = self[number]
            self._weights[number] = (
                weights_in(version.files)
                if version.base is None
                else changed(self.weights(version.base), version.files, number)
            )
        return self._weights[number]

    def has_chain(self, number: int) -> bool:
        """Whether all is there that a version builds on."""
        return number in self and (self[number].base is None or self.has_chain(self[number].base or 0))

    def violations(self) -> Iterator[str]:
        """Versions with files that are not as the manifest says, and chains that are broken."""
        for number, version in self.items():
            told = {entry["name"]: entry for entry in version.manifest["files"]}
            there = {name for name in version.files if not name.startswith(_OURS)}
            if there != told.keys():
                yield f"version {number} has {sorted(there ^ told.keys())} too much, or not"
            for name in there & told.keys():
                data = version.files[name]
                if len(data) != told[name]["size"] or zlib.crc32(data) != told[name]["crc32"]:
                    yield f"version {number}: {name} is not what its manifest says"
            if version.base is not None and version.base != number - 1:
                yield f"version {number} is based on {version.base}"
            if version.base is not None and version.base not in self:
                yield f"version {number} has lost its base {version.base}; there are {[*self]}"


def is_there(disk: Disk | SimulatedObjects, folder: str) -> bool:
    return isinstance(disk, SimulatedObjects) or isinstance(disk.find(folder), DiskFolder)


def files_in(disk: Disk | SimulatedObjects, folder: str) -> dict[str, bytes]:
    """The files in a folder, by name; not those of its folders."""
    if not is_there(disk, folder):
        return {}
    names = {path: path[len(folder) + 1 :] for path in disk.walk(folder)}
    return {
        name: bytes(disk.file(path).data)
        for path, name in names.items()
        if "/" not in name and not (isinstance(disk, Disk) and isinstance(disk.find(path), DiskFolder))
    }


def safetensors_in(data: bytes) -> tuple[dict[str, bytes], Mapping[str, str]]:
    """The tensors of a safetensors file, and its metadata."""
    (length,) = np.frombuffer(data[:8], "<u8")
    header = json.loads(data[8 : 8 + int(length)])
    metadata = header.pop("__metadata__", {})
    body = data[8 + int(length) :]
    ends = [entry["data_offsets"][1] for entry in header.values()]
    assert max(ends, default=0) == len(body), "the header does not cover the file"
    return {name: body[slice(*entry["data_offsets"])] for name, entry in header.items()}, metadata


def weights_in(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The weights of a Hugging Face folder."""
    found: dict[str, bytes] = {}
    where: dict[str, str] = {}
    for name, data in files.items():
        if name.endswith(".safetensors"):
            tensors, _ = safetensors_in(data)
            assert not found.keys() & tensors.keys(), "a tensor is in two files"
            found |= tensors
            where |= dict.fromkeys(tensors, name)
    if len(set(where.values())) > 1 or INDEX in files:
        assert json.loads(files[INDEX])["weight_map"] == where, "the index says other files"
    return found


def changed(old: Mapping[str, bytes], files: Mapping[str, bytes], number: int) -> dict[str, bytes]:
    """The weights after a delta."""
    index = json.loads(files[INDEX])
    about, new = index["metadata"], dict(old)
    assert (int(about["version"]), int(about["base_version"])) == (number, number - 1), about
    assert (about["compression_format"], about["checksum_format"]) == ("zstd", "xxh3-128"), about
    shards = {name: safetensors_in(data) for name, data in files.items() if name.endswith(".safetensors")}
    assert {name: file for file, (tensors, _) in shards.items() for name in tensors} == index["weight_map"]
    for tensors, checksums in shards.values():
        for name, data in tensors.items():
            size = len(old[name])
            plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=4 + 9 * size)
            new[name] = (_xored if about["delta_encoding"] == "xor" else _overwritten)(plain, old[name])
            assert xxhash.xxh3_128_hexdigest(new[name]) == checksums[name], f"the checksum of {name}"
            assert new[name] != old[name], f"{name} is in a delta, and did not change"
    return new


def _xored(plain: bytes, old: bytes) -> bytes:
    return bytes(np.frombuffer(plain, np.uint8) ^ np.frombuffer(old, np.uint8))


def _overwritten(plain: bytes, old: bytes) -> bytes:
    (count,) = np.frombuffer(plain[:4], "<u4")
    positions = np.frombuffer(plain[4 : 4 + 4 * int(count)], "<u4")
    new = np.frombuffer(old, np.uint8).copy()
    new[positions] = np.frombuffer(plain[4 + 4 * int(count) :], np.uint8)
    return bytes(new)
