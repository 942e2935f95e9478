"""Whatever happens to a checkpoint's bytes, it loads bit-exact or it says which file is damaged.

The seed is printed, and taken from CKPT_TEST_SEED where that is set.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from damage import damaged, flipped
from evidence import Record

from ckpt_component import CheckpointCorruptError, CheckpointError, build_checkpointer
from ckpt_component.core.image.copy import LARGE_BYTES
from ckpt_component.core.libc import IOV_MAX
from ckpt_component.core.storage.file_set import CHUNK_BYTES
from ckpt_component.core.storage.locate import storage_at
from ckpt_component.core.writing.request import WriteOptions
from ckpt_component.formats import open_index
from ckpt_component.formats.ranges import MANY_ITEMS, SMALL_BYTES

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

#: Over all writers.
_DAMAGES = 2000
_WRITERS = ("dcp", "torch_save", "safetensors")
_WORKERS = 4
#: Bytes from which on tensors are read alone, are copied alone, are verified in pieces, and are written in blocks.
_BORDERS = (SMALL_BYTES, LARGE_BYTES, CHUNK_BYTES, WriteOptions().block_bytes)
#: Numbers of tensors around that of parallel writers, of those of one read, and of those whose checksums are combined;
#: and one of which most are that many too.
_COUNTS = (
    *(around for border in (_WORKERS, IOV_MAX // 2, MANY_ITEMS) for around in (border - 1, border + 1)),
    MANY_ITEMS * 5 // 4,
)


def state_of(step: int, *, objects: bool, large: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    tensors = {
        "weight": torch.randn(17, 3, generator=generator),
        "bias": torch.randn(5, generator=generator).to(torch.bfloat16),
        "mask": torch.rand(9, generator=generator) > 0.5,
        "count": torch.tensor(step),
        "none": torch.empty(0, 4),
        "layers": {"inner": torch.arange(step, step + 40)},
    }
    if large:  # it is read and verified by itself
        tensors["large"] = torch.randint(-128, 127, (SMALL_BYTES + 77,), dtype=torch.int8, generator=generator)
    return {**tensors, "step": step, "rng": ("text", step, [1.5, None])} if objects else tensors


def assert_equal(found: Any, wanted: Any, what: str) -> None:
    assert type(found) is type(wanted), what
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), what
        for key, value in wanted.items():
            assert_equal(found[key], value, what)
    elif isinstance(wanted, torch.Tensor):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), what
        assert (
            found.contiguous().view(torch.uint8).equal(wanted.contiguous().view(torch.uint8))
            if found.dim()
            else (found.equal(wanted))
        ), what
    else:
        assert found == wanted, what


def zeros_like(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: zeros_like(value) for key, value in state.items()}
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else None


def seed() -> int:
    return int(os.environ.get("CKPT_TEST_SEED", "20261121"))


@pytest.mark.turns(3)
@pytest.mark.slow
@pytest.mark.parametrize("writer", _WRITERS)
def test_no_damage_loads_silently_wrong(writer: str, tmp_path: Path, record_property: Record) -> None:
    rng = random.Random(f"{seed()} {writer}")
    outcomes: Counter[str] = Counter()
    objects = writer != "safetensors"
    with build_checkpointer("sync", [f"checkpoint/writer={writer}", "checkpoint.durability=process_crash"]) as ours:
        # Where a tensor is large, most damage is to it.
        states = {large: state_of(1, objects=objects, large=large) for large in (False, True)}
        for large, state in states.items():
            ours.save(state, tmp_path / f"{large}")
            ours.save(state_of(2, objects=objects, large=large), tmp_path / f"{large} twin")
        for number in range(_DAMAGES // len(_WRITERS) + 1):
            large = number % 10 >= 8
            path, state = tmp_path / f"{large}", states[large]
            if number % 50 == 0:  # what is whole is not refused
                assert_equal(ours.load(path), state, f"{writer}, undamaged before damage {number}")
            with damaged(path, tmp_path / f"{large} twin", rng) as (done, name):
                what = f"seed {seed()}, {writer}, damage {number}: {done}"
                try:
                    loaded = ours.load(path, zeros_like(state) if number % 2 else None)
                except CheckpointCorruptError as error:
                    assert name in str(error), f"{what}: {error}"
                    outcomes["refused"] += 1
                else:
                    assert_equal(loaded, state, what)
                    outcomes["bit-exact"] += 1
    print(f"\nseed {seed()}, {writer}: {dict(outcomes)}, loaded wrong: 0")
    record_property("damages", outcomes.total())
    # Most of a checkpoint is read, so most damage is seen; what is never read may be damaged.
    assert outcomes["refused"] > outcomes["bit-exact"]


@pytest.mark.parametrize("into", ["nothing", "the state", "another dtype", "transposed"])
@pytest.mark.parametrize("writer", _WRITERS)
def test_a_flipped_bit_in_any_item_is_found(writer: str, into: str, tmp_path: Path) -> None:
    """Small tensors are read many at a time, large ones one by one, some through a copy, and objects apart."""
    state = state_of(1, objects=writer != "safetensors", large=True)
    targets: dict[str, Any] = {"nothing": None, "the state": zeros_like(state)}
    if into == "another dtype":
        targets[into] = {key: zeros_like(value) for key, value in state.items() if key not in ("step", "rng")}
        targets[into]["large"] = torch.zeros(state["large"].shape, dtype=torch.float64)
    elif into == "transposed":
        targets[into] = {
            "large": torch.zeros(state["large"].numel(), 2, dtype=torch.int8)[:, 0],
            "weight": torch.zeros(3, 17).t(),
        }
    with build_checkpointer("sync", [f"checkpoint/writer={writer}"]) as ours:
        ours.save(state, tmp_path / "one")
        target = targets[into]
        ours.load(tmp_path / "one", target, allow_dtype_cast=True)
        index = open_index(storage_at(tmp_path), tmp_path / "one")
        for key, entry in index.entries.items():
            (piece,) = index.contents.ranges_at(entry.place)
            if piece.length == 0 or (target is not None and key.partition(".")[0] not in target):
                continue
            path = tmp_path / "one" / piece.file
            whole = path.read_bytes()
            place = piece.offset + piece.length // 2 if piece.payload is None else piece.payload
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(CheckpointCorruptError, match=f"{key}|{piece.file}"):
                ours.load(tmp_path / "one", target, allow_dtype_cast=True)
            path.write_bytes(whole[:-1])
            with pytest.raises(CheckpointCorruptError, match="lists it with"):
                ours.load(tmp_path / "one", target, allow_dtype_cast=True)
            path.write_bytes(whole)
        ours.load(tmp_path / "one", target, allow_dtype_cast=True)


def flips_in(folder: Path) -> Iterator[tuple[str, Path, int]]:
    """The key of each stored tensor, with a file and a place in it: where the item begins, in its payload, at its end."""
    index = open_index(storage_at(folder.parent), folder)
    for key, entry in index.entries.items():
        for piece in index.contents.ranges_at(entry.place):
            payload = piece.offset if piece.payload is None else piece.payload
            end = piece.offset + piece.length - 1
            for place in sorted({piece.offset, (payload + end) // 2, end}):
                yield key, folder / piece.file, place


@pytest.mark.parametrize(
    ("writer", "stager"), [*((writer, "none") for writer in _WRITERS), ("dcp", "shared_memory")], ids=str
)
def test_a_flipped_bit_is_found_in_a_tensor_of_any_size(writer: str, stager: str, tmp_path: Path) -> None:
    """On both sides of each size at which a tensor is copied, written or read in another way."""
    generator = torch.Generator().manual_seed(3)
    state = {
        f"{size} bytes": torch.randint(-128, 127, (size,), dtype=torch.int8, generator=generator)
        for border in _BORDERS
        for size in (border // 2, border, border + 1)  # stored items may be longer than their payloads
    }
    parts = [f"checkpoint/writer={writer}", f"checkpoint/stager={stager}", "checkpoint.durability=process_crash"]
    with build_checkpointer("sync", parts) as ours:
        ours.save(state, tmp_path / "one")
        seen = set[str]()
        for key, path, place in flips_in(tmp_path / "one"):
            with flipped(path, place), pytest.raises(CheckpointCorruptError, match=f"'{key}'|{path.name}"):
                ours.load(tmp_path / "one", {key: torch.zeros_like(state[key])})
            seen.add(key)
        assert seen == state.keys()
        assert_equal(ours.load(tmp_path / "one", zeros_like(state)), state, writer)


@pytest.mark.parametrize("count", _COUNTS)
@pytest.mark.parametrize("writer", _WRITERS)
def test_a_flipped_bit_is_found_among_any_number_of_tensors(writer: str, count: int, tmp_path: Path) -> None:
    """On both sides of each number at which tensors are shared out, read or verified in another way."""
    generator = torch.Generator().manual_seed(count)
    state = {
        f"t{number}.": torch.randint(-128, 127, (1 + number % 1500,), dtype=torch.int8, generator=generator)
        for number in range(count)
    }
    parts = [f"checkpoint/writer={writer}", f"checkpoint.writer.workers={_WORKERS}"]
    with build_checkpointer("sync", [*parts, "checkpoint.durability=process_crash"]) as ours:
        ours.save(state, tmp_path / "one")
        every = zeros_like(state)
        most = {key: every[key] for number, key in enumerate(every) if number % 8}
        flips = sorted(flips_in(tmp_path / "one"), key=itemgetter(1, 2))
        for number, (key, path, place) in enumerate(flips[:: max(len(flips) // 5, 1)] + flips[-1:]):
            target = every if number % 2 else {**most, key: every[key]}
            with flipped(path, place), pytest.raises(CheckpointCorruptError, match=f"'{key}'|{path.name}"):
                ours.load(tmp_path / "one", target)
        assert_equal(ours.load(tmp_path / "one", every), state, writer)


def test_an_object_is_verified_beyond_what_its_archive_checks(tmp_path: Path) -> None:
    """The archive has checksums of its own, but not of its headers and padding."""
    with build_checkpointer("sync") as ours:
        ours.save(state_of(1, objects=True), tmp_path / "one")
        index = open_index(storage_at(tmp_path), tmp_path / "one")
        (piece,) = index.contents.ranges_at(index.entries["rng"].place)
        path = tmp_path / "one" / piece.file
        whole = path.read_bytes()
        for place in range(piece.offset, piece.offset + piece.length, 11):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(CheckpointCorruptError, match=r"'rng' of .* is damaged"):
                ours.load(tmp_path / "one", {"rng": None})


def test_an_item_is_named(tmp_path: Path) -> None:
    with build_checkpointer("sync") as ours:
        ours.save({"model": {"weight": torch.ones(1000), "other": torch.ones(1000)}}, tmp_path / "one")
        path = tmp_path / "one" / "__0_1.distcp"
        whole = bytearray(path.read_bytes())
        whole[len(whole) // 2] ^= 1
        path.write_bytes(whole)
        with pytest.raises(CheckpointCorruptError, match=r"'model\.(weight|other)' of .*__0_1\.distcp is damaged"):
            ours.load(tmp_path / "one")


def test_a_file_that_is_missing_or_too_much(tmp_path: Path) -> None:
    with build_checkpointer("sync") as ours:
        ours.save({"a": torch.ones(100), "n": 1}, tmp_path / "one")
        (tmp_path / "one" / "__0_9.distcp").write_bytes(b"not ours")
        assert ours.load(tmp_path / "one")["n"] == 1
        for name in ("__0_0.distcp", "__0_1.distcp", "integrity-0.json"):
            path = tmp_path / "one" / name
            whole = path.read_bytes()
            path.unlink()
            with pytest.raises(CheckpointCorruptError, match=f"{name} is missing"):
                ours.load(tmp_path / "one")
            path.write_bytes(whole)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dcp", "torch.save", "safetensors"])
def test_damage_to_files_of_others_gives_typed_errors_alone(kind: str, tmp_path: Path) -> None:
    """They have no checksums, so a flipped payload cannot be seen; but nothing else than our errors comes out."""
    from safetensors.torch import save_file

    rng = random.Random(f"{seed()} {kind}")
    for step in (1, 2):
        state = state_of(step, objects=kind != "safetensors")
        folder = tmp_path / f"{step}"
        folder.mkdir()
        if kind == "dcp":
            dcp.save(state, checkpoint_id=folder)
        elif kind == "torch.save":
            torch.save(state, folder / "file.pt")
        else:
            save_file({key: value for key, value in state.items() if key != "layers"}, folder / "file.safetensors")
    outcomes: Counter[str] = Counter()
    with build_checkpointer("sync") as ours:
        for number in range(300):
            with damaged(tmp_path / "1", tmp_path / "2", rng) as (done, _):
                try:
                    ours.load(tmp_path / "1")
                except CheckpointError:
                    outcomes["refused"] += 1
                except Exception as error:
                    raise AssertionError(f"seed {seed()}, {kind}, damage {number}: {done}") from error
                else:
                    outcomes["loaded"] += 1
    assert outcomes["refused"] > 50
