"""Versions of published weights as their format says, by a writer that shares no code with ours but the commit."""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard
from publishing.published_format import tensors_of

from ckpt_component.core.commit.commit import begin, new_attempt, publish
from ckpt_component.core.commit.liveness import AttemptLock
from ckpt_component.core.storage.locate import storage_at
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.publishing.local_copy import Pulled
from ckpt_component.publishing.receiver import Receiver

State = Mapping[str, np.ndarray]
NAMES = {"float32": "F32", "uint16": "BF16", "uint8": "U8", "int64": "I64"}
CONFIG = b'{"model_type": "none"}\n'


def random_state(seed: int = 0, scale: int = 1) -> dict[str, np.ndarray]:
    """Tensors of several dtypes and sizes, one of them empty, one a scalar; `uint16` stands for bfloat16."""
    rng = np.random.default_rng(seed)
    state: dict[str, np.ndarray] = {
        f"layers.{number}.weight": rng.integers(0, 1 << 16, (64 * scale, 32), np.uint16) for number in range(4)
    }
    state["norm.weight"] = rng.standard_normal(37).astype(np.float32)
    state["steps"] = np.array(seed, np.int64)
    state["nothing"] = np.zeros((0, 3), np.float32)
    return state


def stepped(state: State, seed: int, names: int = 3) -> dict[str, np.ndarray]:
    """The state after a step: a few values of some tensors differ."""
    rng, new = np.random.default_rng(seed), {name: array.copy() for name, array in state.items()}
    for name in rng.permutation([name for name, array in state.items() if array.size])[:names]:
        flat = new[name].reshape(-1).view(np.uint8)
        flat[rng.integers(0, flat.size, max(flat.size // 50, 1))] ^= 5
    return new


def safetensors(tensors: State, metadata: Mapping[str, str], dtypes: Mapping[str, str]) -> bytes:
    """A safetensors file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, array in tensors.items():
        header[name] = {"dtype": dtypes[str(array.dtype)], "shape": list(array.shape)}
        header[name]["data_offsets"] = [position, position + array.nbytes]
        position += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(array.tobytes() for array in tensors.values())


def encoded(encoding: str, new: np.ndarray, old: np.ndarray) -> np.ndarray | None:
    """The compressed change of a tensor; None: there is none."""
    after, before = (np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (new, old))
    changed = np.flatnonzero(after != before)
    if not changed.size:
        return None
    data = (after ^ before).tobytes()
    if encoding == "overwrite":
        positions = changed.astype("<u4").tobytes()
        data = struct.pack("<I", changed.size) + positions + after[changed].tobytes()
    return np.frombuffer(zstandard.ZstdCompressor(level=1).compress(data), np.uint8)


def whole_files(state: State, shards: int = 1) -> dict[str, bytes]:
    """The files of a whole version."""
    files = {"config.json": CONFIG}
    if shards == 1:
        return files | {"model.safetensors": safetensors(state, {"format": "pt"}, NAMES)}
    names, weight_map = list(state), dict[str, str]()
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: state[name] for name in names[shard::shards]}
        weight_map |= dict.fromkeys(part, file)
        files[file] = safetensors(part, {"format": "pt"}, NAMES)
    index = {"metadata": {"total_size": sum(array.nbytes for array in state.values())}, "weight_map": weight_map}
    return files | {"model.safetensors.index.json": json.dumps(index).encode()}


def delta_files(number: int, state: State, old: State, encoding: str = "xor", shards: int = 2) -> dict[str, bytes]:
    """The files of a delta."""
    changes = {name: encoded(encoding, state[name], old[name]) for name in state}
    there = {name: data for name, data in changes.items() if data is not None}
    files, weight_map = dict[str, bytes](), dict[str, str]()
    for shard in range(min(shards, len(there))):
        file = f"model-{shard + 1:05d}.safetensors"
        part = {name: there[name] for name in list(there)[shard::shards]}
        sums = {name: xxhash.xxh3_128_hexdigest(state[name].tobytes()) for name in part}
        files[file] = safetensors(part, sums, {"uint8": "U8"})
        weight_map |= dict.fromkeys(part, file)
    metadata = {
        "version": f"{number:06d}",
        "base_version": f"{number - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    }
    return files | {
        "model.safetensors.index.json": json.dumps({"metadata": metadata, "weight_map": weight_map}).encode()
    }


class Source:
    """A folder or a bucket with versions.

    Args:
        root: path or URL
        shards: files of a whole version

    Attributes:
        states: the weights of each version that was published
    """

    def __init__(self, root: str | Path, shards: int = 1) -> None:
        self.root = str(root)
        self.storage = storage_at(self.root)
        self.shards = shards
        self.states: dict[int, State] = {}

    def path(self, number: int) -> Path:
        """The folder of a version."""
        return Path(self.root, f"weight_v{number:06d}")

    def whole(self, number: int, state: State) -> None:
        """Publish a whole version."""
        self._publish(number, None, state, whole_files(state, self.shards))

    def delta(self, number: int, state: State, encoding: str = "xor") -> None:
        """Publish the changes of the version before."""
        old = self.states[number - 1]
        self._publish(number, number - 1, state, delta_files(number, state, old, encoding))

    def chain(self, first: int, last: int, encoding: str = "xor", scale: int = 1) -> None:
        """Publish a whole version and deltas on it."""
        state = random_state(first, scale)
        self.whole(first, state)
        for number in range(first + 1, last + 1):
            state = stepped(state, number)
            self.delta(number, state, encoding)

    def _publish(self, number: int, base: int | None, state: State, files: Mapping[str, bytes]) -> None:
        attempt = new_attempt(self.storage, f"{self.root}/weight_v{number:06d}", new_token())
        begin(attempt)
        lock = AttemptLock(self.storage, attempt)
        entries = []
        for name, data in files.items():
            self.storage.write_new(f"{attempt.staging}/{name}", data)
            entries.append({"name": name, "size": len(data), "crc32": zlib.crc32(data)})
        weights: dict[str, Any] = {
            "version": number,
            "tensors": len(state),
            "nbytes": sum(array.nbytes for array in state.values()),
        }
        weights |= {"options": "same", "source": f"/run/iter_{100 * number:07d}", "committed": time.time()}
        weights |= {} if base is None else {"base": base}
        publish(attempt, [{"rank": 0, "files": entries}], {}, {"step": 100 * number, "weights": weights})
        lock.close()
        self.states[number] = state


def bytes_of(state: State) -> dict[str, bytes]:
    """The bytes of the tensors of a state."""
    return {name: array.tobytes() for name, array in state.items()}


def version_at(folder: str | Path) -> int | None:
    """Which version the folder says it has; None: there is no folder."""
    path = Path(folder)
    return json.loads((path / ".ckpt-version.json").read_text())["version"] if path.exists() else None


def assert_at(source: Source, folder: str | Path, number: int) -> None:
    """The folder has exactly a version: its weights, its small files, and what says which one it is."""
    assert version_at(folder) == number
    assert tensors_of(Path(folder)) == bytes_of(source.states[number])
    path = Path(folder)
    assert (path / "config.json").read_bytes() == CONFIG
    names = {*whole_files(source.states[number], source.shards), ".ckpt-version.json"}
    assert {each.name for each in path.iterdir()} == names


def leftovers(folder: str | Path) -> list[str]:
    """What is beside a folder that no other program put there, but the empty folder that is locked."""
    path = Path(folder)
    work = path.parent / f".ckpt-pull.{path.name}"
    return [str(each) for each in work.rglob("*")]


def pull(source: Source, folder: str, number: int | None = None) -> Pulled:
    """Bring a folder to a version, as a process of its own would; None: to the newest."""
    with Receiver(source.root, folder) as receiver:
        return receiver.pull(number)
