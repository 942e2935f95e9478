"""Versions of the weights of checkpoints: each gives the weights of its checkpoint, by a reader of the format alone."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from publishing.publish_worlds import State, bytes_of, publish, publisher, save, weights_at
from publishing.published_format import changes_of, is_delta, pull
from ranks import run_ranks

from ckpt_component import (
    CheckpointConfigError,
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointFencedError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    CheckpointStorageFullError,
    build_checkpointer,
)
from ckpt_component.core.commit.fencing import FencingToken
from ckpt_component.core.commit.manifest import read_manifest
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.locate import storage_at
from ckpt_component.exporting.blocks import BLOCK_BYTES
from ckpt_component.publishing.delta import DeltaFiles
from ckpt_component.publishing.publisher import Published
from ckpt_component.publishing.versions import NAMES, Versions, chain_to

#: The error of a run that publishes where another one has taken over.
SHARED = r"took over \S*/to,? .* give each a checkpoint\.publish\.to of its own\.$"


class World:
    """A run that saves and publishes; each version is made by a publisher of its own, as by a process."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root, self.to, self.mirror, self.options = root, root / "to", root / "mirror", options
        self.expected: dict[int, dict[str, bytes]] = {}

    def version(self, step: int, model: State | None = None, **options: Any) -> Published:
        model = weights_at(step) if model is None else model
        path = save(self.root, step, model)
        done = publish(publisher(self.to, self.mirror, **{**self.options, **options}), path, step)
        self.expected[done.version] = bytes_of(model)
        return done

    def check(self) -> None:
        """Each version gives the weights of its checkpoint, from nothing and from the version before."""
        before = None
        for number in sorted(self.expected):
            if not (self.to / NAMES.folder(number)).exists():
                continue
            assert pull(self.to, number) == self.expected[number], number
            if before is not None:
                assert pull(self.to, number, number - 1, self.expected[before]) == self.expected[number]
            before = number


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def kinds(world: World) -> list[bool]:
    return [is_delta(world.to / name) for name in sorted(os.listdir(world.to)) if not name.startswith(".")]


@pytest.mark.parametrize("delta", ["auto", "overwrite", "off"])
def test_a_whole_version_and_deltas(delta: str, tmp_path: Path) -> None:
    world = World(tmp_path, delta=delta)
    for step in (1, 2, 3):
        done = world.version(step)
        assert (done.version, done.step, done.is_whole) == (step, step, step == 1 or delta == "off")
        assert done.path == str(world.to / f"weight_v{step:06d}") and not done.deleted
        sizes = [path.stat().st_size for path in Path(done.path).iterdir() if path.name != "manifest.json"]
        assert done.nbytes == sum(sizes)
        assert (done.nbytes == done.whole_nbytes) == done.is_whole
    world.check()
    assert sorted(os.listdir(world.to)) == [".ckpt-owner.json", *(f"weight_v{n:06d}" for n in (1, 2, 3))]


def test_whole_versions_need_no_mirror_and_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, delta="off")
    for package in ("xxhash", "zstandard"):
        monkeypatch.setitem(sys.modules, package, None)
    assert world.version(1).is_whole and world.version(2).is_whole
    assert not world.mirror.exists() and not caplog.text
    with pytest.raises(CheckpointConfigError, match=r"delta=auto needs the package xxhash: pip install"):
        world.version(3, delta="auto")
    monkeypatch.undo()
    assert world.version(4, delta="auto").is_whole and not world.version(5, delta="auto").is_whole
    world.check()


def test_a_manifest_says_what_a_version_is(world: World) -> None:
    for step in (10, 20):
        world.version(step)
    manifest = read_manifest(storage_at(world.to), str(world.to / "weight_v000002"))
    assert manifest is not None
    weights, nbytes = manifest["weights"], sum(map(len, world.expected[2].values()))
    assert (manifest["step"], weights["version"], weights["base"]) == (20, 2, 1)
    assert (weights["tensors"], weights["nbytes"]) == (7, nbytes)
    assert weights["source"] == str(world.root / "iter_0000020") and weights["committed"] <= manifest["created"]
    for entry in manifest["files"]:
        data = (world.to / "weight_v000002" / entry["name"]).read_bytes()
        assert (entry["size"], entry["crc32"]) == (len(data), zlib.crc32(data))
    first = read_manifest(storage_at(world.to), str(world.to / "weight_v000001"))
    assert first is not None and "base" not in first["weights"] and all("crc32" in entry for entry in first["files"])


def test_only_what_has_changed_is_in_a_delta(world: World) -> None:
    world.version(1)
    world.version(2)
    metadata, changes = changes_of(world.to / "weight_v000002")
    assert metadata["delta_encoding"] == "xor" and sorted(changes) == ["embed", "layers.0.weight", "scale"]


@pytest.mark.parametrize("delta", ["overwrite", "auto"])
def test_a_tensor_whose_positions_the_encoding_has_no_room_for_makes_each_version_whole(
    delta: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if positions had fewer bits: a tensor of 4 GB is too much for a test."""
    monkeypatch.setattr("ckpt_component.publishing.delta.MOST_POSITIONS", 300 * 40 * 2 - 1)
    world = World(tmp_path, delta=delta)
    assert [world.version(step).is_whole for step in (1, 2, 3)] == [True, *[delta == "overwrite"] * 2]
    world.check()


@pytest.mark.parametrize("delta", ["auto", "overwrite"])
def test_tensors_of_many_blocks(delta: str, tmp_path: Path) -> None:
    """They are read, compared, copied and encoded block by block."""
    world = World(tmp_path, delta=delta, whole_every=2)
    size = BLOCK_BYTES // 2 + 5
    model = {
        "small": torch.ones(3),
        "large": torch.randn(size, generator=torch.Generator().manual_seed(1)),
        "other": torch.randn(size // 2, generator=torch.Generator().manual_seed(2)),
    }
    kinds = []
    for step in range(1, 5):
        kinds.append(world.version(step, model).is_whole)
        model = {name: tensor.clone() for name, tensor in model.items()}
        for place in (0, size // 2, size - 1):
            model["large"][place] += 1
        model["other"][-1] *= 2
    assert kinds == [True, False, False, True]
    world.check()


def test_a_delta_without_a_change(world: World) -> None:
    world.version(1)
    assert not world.version(2, weights_at(1)).is_whole
    world.version(3)
    index = json.loads((world.to / "weight_v000002" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {} and len(os.listdir(world.to / "weight_v000002")) == 2
    world.check()


def test_a_whole_version_after_so_many_deltas(tmp_path: Path) -> None:
    world = World(tmp_path, whole_every=2)
    assert [world.version(step).is_whole for step in range(1, 8)] == [True, False, False, True, False, False, True]
    world.check()


def test_the_newest_are_kept_with_what_they_build_on(tmp_path: Path) -> None:
    world = World(tmp_path, whole_every=3, keep=2)
    deleted = [world.version(step).deleted for step in range(1, 8)]
    assert deleted == [[], [], [], [], [], [1, 2, 3, 4], []] or deleted[-1] == []
    versions = Versions(storage_at(world.to), str(world.to)).look()
    assert max(versions) == 7 and versions[min(versions)].is_whole and len(versions) <= 3
    assert chain_to(versions, 7, None)[-1].number == 7
    world.check()


def test_weights_of_which_everything_changes_are_whole(world: World) -> None:
    world.version(1)
    assert world.version(2, weights_at(1, seed=5)).is_whole
    assert not world.version(
        3, {**weights_at(1, seed=5), "scale": torch.tensor(7.0, device="cpu", dtype=torch.float32)}
    ).is_whole
    world.check()
    assert sorted(os.listdir(world.to / "weight_v000002")) == ["manifest.json", "model.safetensors"]


@pytest.mark.parametrize("change", ["dtype", "shape", "name", "more"])
def test_other_tensors_need_a_whole_version(change: str, world: World) -> None:
    world.version(1)
    model = weights_at(2)
    if change == "dtype":
        model["embed"] = model["embed"].half()
    elif change == "shape":
        model["embed"] = model["embed"].reshape(40, 300)
    elif change == "name":
        model["embedding"] = model.pop("embed")
    else:
        model["more"] = torch.ones(3, device="cpu", dtype=torch.float32)
    assert world.version(2, model).is_whole
    assert not world.version(3, model).is_whole
    world.check()


def test_other_options_need_a_whole_version(world: World) -> None:
    world.version(1)
    assert world.version(2, rename={"embed": "embedding"}).is_whole
    assert not world.version(3, rename={"embed": "embedding"}).is_whole
    assert world.version(4).is_whole


def test_a_changed_config_needs_a_whole_version(world: World) -> None:
    folder = world.root / "config"
    folder.mkdir()
    (folder / "config.json").write_text('{"layers": 1}')
    options: dict[str, Any] = {"config_from": str(folder)}
    assert world.version(1, **options).is_whole and not world.version(2, **options).is_whole
    (folder / "config.json").write_text('{"layers": 2}')
    assert world.version(3, **options).is_whole
    assert json.loads((world.to / "weight_v000003" / "config.json").read_text()) == {"layers": 2}


def test_weights_are_converted(tmp_path: Path) -> None:
    world = World(tmp_path, dtype="bfloat16")
    for step in (1, 2):
        model = weights_at(step)
        world.version(step, model)
        world.expected[step] = bytes_of(
            {name: each.to(torch.bfloat16) if each.is_floating_point() else each for name, each in model.items()}
        )
    assert kinds(world) == [False, True]
    world.check()


def test_tied_tensors_are_published_once(world: World) -> None:
    for step in (1, 2):
        model = weights_at(step)
        world.version(step, {**model, "head": model["embed"]})
        world.expected[step] = bytes_of(model)
    assert kinds(world) == [False, True]
    world.check()


def test_files_of_bounded_size(tmp_path: Path) -> None:
    world = World(tmp_path, max_shard_bytes=10_000)
    for step in (1, 2, 3):
        world.version(step)
    assert len(list((world.to / "weight_v000001").glob("*.safetensors"))) > 2
    assert kinds(world) == [False, True, True]
    world.check()


def test_our_reader_gives_the_same_changes(world: World) -> None:
    world.version(1)
    world.version(2)
    storage = storage_at(world.to)
    version = Versions(storage, str(world.to)).look()[2]
    files, (_, changes) = DeltaFiles(storage, version), changes_of(world.to / "weight_v000002")
    assert files.encoding == "xor" and sorted(files.names()) == sorted(changes)
    assert {name: (bytes(data), checksum) for name in files.names() for data, checksum in [files.read(name)]} == changes


def test_damage_of_a_file_of_changes_is_noticed(world: World) -> None:
    world.version(1)
    world.version(2)
    storage, folder = storage_at(world.to), world.to / "weight_v000002"
    version = Versions(storage, str(world.to)).look()[2]
    for name in ("model-00001.safetensors", "model.safetensors.index.json"):
        data = (folder / name).read_bytes()
        for damaged in (data[:-1] + bytes([data[-1] ^ 1]), data[:-1], b"", None):
            (folder / name).unlink()
            if damaged is not None:
                (folder / name).write_bytes(damaged)
            with pytest.raises(CheckpointCorruptError, match=name):
                files = DeltaFiles(storage, version)
                for tensor in files.names():
                    files.read(tensor)
        (folder / name).write_bytes(data)


@pytest.mark.parametrize("damage", ["bytes", "state", "sums", "sums of another", "no sums", "gone", "longer", "other"])
def test_a_mirror_that_is_not_what_was_published_gives_a_whole_version(
    damage: str, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.version(1)
    mirror = world.mirror
    if damage == "bytes":  # as a power cut may do it
        data = bytearray((mirror / "model.safetensors").read_bytes())
        data[-500] ^= 1
        (mirror / "model.safetensors").write_bytes(data)
    elif damage == "state":
        (mirror / ".ckpt-version.json").write_text("{")
    elif damage == "sums":
        (mirror / ".ckpt-checksums.json").write_text("{")
    elif damage == "sums of another":
        (mirror / ".ckpt-checksums.json").write_text('{"attempt": "another", "tensors": {}}')
    elif damage == "no sums":
        (mirror / ".ckpt-checksums.json").unlink()
    elif damage == "gone":
        (mirror / "model.safetensors").unlink()
    elif damage == "longer":
        with open(mirror / "model.safetensors", "ab") as stream:
            stream.write(b"x")
    else:
        world.mirror = world.root / "another"
    assert world.version(2).is_whole
    assert not world.version(3).is_whole
    world.check()
    assert ("the mirror was damaged" in caplog.text) == (damage == "bytes")
    assert (".json is damaged" in caplog.text) == (damage in ("state", "sums"))


def test_a_folder_with_other_files_is_no_mirror(world: World) -> None:
    world.mirror.mkdir()
    (world.mirror / "thesis.tex").write_text("precious")
    with pytest.raises(CheckpointExistsError, match=r"thesis.tex.*checkpoint.publish.mirror=FOLDER"):
        world.version(1)
    assert (world.mirror / "thesis.tex").read_text() == "precious"


def test_a_checkpoint_that_is_damaged_is_not_published(world: World) -> None:
    world.version(1)
    path = Path(save(world.root, 2, weights_at(2)))
    (data,) = [each for each in path.iterdir() if each.name.endswith(".distcp")][:1]
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointCorruptError):
        publish(publisher(world.to, world.mirror), str(path), 2)
    with pytest.raises(CheckpointNotFoundError):
        publish(publisher(world.to, world.mirror), str(world.root / "iter_0000009"), 9)
    assert kinds(world) == [False]
    assert world.version(3).version == 2
    world.check()


def test_a_new_run_goes_on_with_the_chain(world: World) -> None:
    world.version(1)
    assert not world.version(2, run="second").is_whole
    assert world.version(3, run="second").version == 3
    world.check()


def test_a_run_that_was_fenced_off_publishes_nothing(world: World) -> None:
    world.version(1)
    world.version(2, run="second")
    with pytest.raises(CheckpointFencedError, match=SHARED):
        world.version(3)
    assert sorted(name for name in os.listdir(world.to) if not name.startswith(".ckpt-owner")) == [
        "weight_v000001",
        "weight_v000002",
    ]
    assert not world.version(4, run="second").is_whole


class TakenOver(FileStorage):
    """Another run takes over the folder of the versions before a file is made there; may delete what this one has."""

    def __init__(self, to: Path, before: str, *, deletes: bool) -> None:
        super().__init__()
        self.to, self.before, self.deletes = to, before, deletes

    def write_new(self, path: str, data: bytes) -> None:
        if os.path.basename(path) == self.before:
            if self.deletes:
                shutil.rmtree(os.path.dirname(path))
            FencingToken(FileStorage(), str(self.to), NAMES).acquire()
        super().write_new(path, data)


@pytest.mark.parametrize("deletes", [False, True])
def test_a_run_that_is_fenced_off_while_it_makes_a_version_names_the_folder_that_both_have(
    deletes: bool, world: World
) -> None:
    storage = TakenOver(world.to, "manifest.json", deletes=deletes)
    with pytest.raises(CheckpointFencedError, match=SHARED):
        publish(publisher(world.to, world.mirror, storage=storage), save(world.root, 1, weights_at(1)), 1)
    assert os.listdir(world.to) == [".ckpt-owner.json"]


def test_a_version_that_is_damaged_keeps_its_number(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.version(1)
    world.version(2)
    (world.to / "weight_v000002" / "manifest.json").write_text("{")
    done = world.version(3)
    assert done.version == 3 and done.is_whole
    assert "skipped, not a committed checkpoint" in caplog.text


def test_a_full_disk_is_said_before_a_whole_version(world: World) -> None:
    class Full(FileStorage):
        def free_bytes(self, path: str) -> int | None:
            return 1000

    path = save(world.root, 1, weights_at(1))
    made = publisher(world.to, world.mirror, storage=Full())
    with pytest.raises(CheckpointStorageFullError, match=r"1000 bytes are free.*checkpoint.publish.keep"):
        publish(made, path, 1)
    assert world.version(2).version == 1


def test_a_version_that_cannot_be_deleted_keeps_its_base(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Kept(FileStorage):
        def rename_new(self, source: str, target: str) -> bool:
            if source.endswith("weight_v000002"):
                raise PermissionError(13, "it is held", source)
            return super().rename_new(source, target)

    world = World(tmp_path, whole_every=3, keep=1)
    for step in (1, 2, 3, 4):
        world.version(step)
    assert world.version(5, storage=Kept()).deleted == [3, 4]
    assert "weight_v000002 could not be deleted" in caplog.text
    assert [*Versions(FileStorage(), str(world.to)).look()] == [1, 2, 5]
    world.check()
    assert world.version(6).deleted == [1, 2]


@pytest.mark.parametrize("unreadable", [2, 3])
def test_what_a_version_builds_on_stays_while_its_manifest_cannot_be_read(unreadable: int, tmp_path: Path) -> None:
    """Its disk may answer again in a second, and a receiver that has nothing reads the chain from its first version."""

    class Silent(FileStorage):
        def read(self, path: str, most: int) -> bytes:
            if f"weight_v{unreadable:06d}" in path:
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            return super().read(path, most)

    world = World(tmp_path, whole_every=2, keep=1)
    for step in (1, 2, 3):
        world.version(step)
    before = range(1, unreadable)
    assert {*before}.isdisjoint(world.version(4, storage=Silent()).deleted)
    assert {*Versions(FileStorage(), str(world.to)).look()} >= {*before, unreadable}
    world.check()
    assert {*world.version(5).deleted} >= {*before, unreadable}


@pytest.mark.slow
def test_parts_of_several_ranks_are_the_tensors_that_one_rank_saves(world: World) -> None:
    script = Path(__file__).parents[1] / "saving" / "scripts" / "sharded.py"
    run_ranks(script, "save_sharded", 2, world.root)
    sharded, alone = str(world.root / "shared_memory"), str(world.root / "alone")
    with build_checkpointer("sync") as checkpointer:
        whole = checkpointer.load(sharded)
        assert isinstance(whole, dict)
        whole["rows"].view(-1)[1] += 1
        checkpointer.save(whole, alone)
    names = ("rows", "columns", "square", "few", "alike")
    tensors = bytes_of({name: whole[name] for name in names})
    whole["rows"].view(-1)[1] -= 1
    before = bytes_of({name: whole[name] for name in names})
    for number, (path, expected) in enumerate(((sharded, before), (alone, tensors), (sharded, before)), 1):
        done = publish(publisher(world.to, world.mirror, prefix="", ignore=["step"]), path, number)
        assert done.is_whole == (number == 1)
        pulled = pull(world.to, number)
        assert {name: pulled[name] for name in names} == expected


def test_a_folder_that_cannot_be_written_is_said(world: World) -> None:
    world.to.write_text("a file")
    with pytest.raises((CheckpointSaveError, CheckpointExistsError), match="to"):
        world.version(1)


@pytest.mark.parametrize(
    ("options", "text"),
    [({"delta": "on"}, "auto"), ({"keep": 0}, "keep is 0"), ({"whole_every": -1}, "whole_every is -1")],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointConfigError, match=text):
        publisher(tmp_path / "to", tmp_path / "mirror", **options)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_weights(tmp_path: Path) -> None:
    world = World(tmp_path)
    large = torch.zeros(160 << 20, device="cpu", dtype=torch.uint8)
    world.version(1, {"large": large})
    large[:: 1 << 12] = 1
    path = save(world.root, 2, {"large": large})
    made = publisher(world.to, world.mirror)
    most_memory()
    before = most_memory()
    assert not publish(made, path, 2).is_whole
    assert most_memory() < before + (40 << 20)


def most_memory() -> int:
    """The most memory that this process had at a time since the last call; bytes."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(status.partition("VmHWM:")[2].split()[0]) << 10
