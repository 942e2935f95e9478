"""A reader of the published format that knows nothing of ours: as SGLang's receiver reads it, by numpy and zstandard."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy
import xxhash
import zstandard


def places_in(folder: Path) -> dict[str, tuple[Path, int, int]]:
    """The file, offset and bytes of each tensor of a Hugging Face folder."""
    places = {}
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                places[name] = path, 8 + length + begin, end - begin
    return places


def tensors_of(folder: Path) -> dict[str, bytes]:
    """The bytes of each tensor of a Hugging Face folder."""
    return {name: path.read_bytes()[at : at + count] for name, (path, at, count) in places_in(folder).items()}


def is_delta(folder: Path) -> bool:
    index = folder / "model.safetensors.index.json"
    return index.exists() and "delta_encoding" in json.loads(index.read_text())["metadata"]


def tensors_in(blob: bytes) -> tuple[dict[str, bytes], dict[str, str]]:
    """The tensors of a safetensors file, and its metadata."""
    (length,) = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8 : 8 + length])
    metadata, body = header.pop("__metadata__", {}), blob[8 + length :]
    return {name: body[slice(*entry["data_offsets"])] for name, entry in header.items()}, metadata


def changes_of(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[bytes, str]]]:
    """The metadata of a version, and the compressed changes of each tensor with the checksum of its new bytes."""
    metadata, changes = json.loads((folder / "model.safetensors.index.json").read_text())["metadata"], {}
    for path in sorted(folder.glob("*.safetensors")):
        blob = path.read_bytes()
        (length,) = struct.unpack("<Q", blob[:8])
        header = json.loads(blob[8 : 8 + length])
        checksums = header.pop("__metadata__")
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            assert entry["dtype"] == "U8" and entry["shape"] == [end - begin]
            changes[name] = blob[8 + length + begin : 8 + length + end], checksums[name]
    return metadata, changes


def changed(encoding: str, data: bytes, old: bytes) -> bytes:
    """The new bytes of a tensor."""
    raw = numpy.frombuffer(zstandard.ZstdDecompressor().decompress(data), "u1")
    region = numpy.frombuffer(old, "u1").copy()
    if encoding == "xor":
        region ^= raw
    else:
        count = int.from_bytes(raw[:4].tobytes(), "little")
        region[numpy.frombuffer(raw[4 : 4 + 4 * count].tobytes(), "<u4")] = raw[4 + 4 * count :]
    return region.tobytes()


def pull(root: Path, target: int, have: int = 0, local: dict[str, bytes] | None = None) -> dict[str, bytes]:
    """The tensors of a version: of the newest whole one, and the changes after it, each verified."""
    start = target
    while start > have and is_delta(root / f"weight_v{start:06d}"):
        start -= 1
    tensors = dict(local) if local is not None and start == have else tensors_of(root / f"weight_v{start:06d}")
    for number in range(start + 1, target + 1):
        metadata, changes = changes_of(root / f"weight_v{number:06d}")
        assert (int(metadata["version"]), int(metadata["base_version"])) == (number, number - 1)
        assert (metadata["compression_format"], metadata["checksum_format"]) == ("zstd", "xxh3-128")
        for name, (data, checksum) in changes.items():
            tensors[name] = changed(metadata["delta_encoding"], data, tensors[name])
            assert xxhash.xxh3_128_hexdigest(tensors[name]) == checksum
    return tensors
