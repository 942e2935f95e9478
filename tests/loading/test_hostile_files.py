"""Files that want to do harm: code, paths and special files, shapes and keys."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forging import Malicious, edit_manifest, edit_metadata, edit_table, note_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from ckpt_component import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointLoadError,
    CheckpointUnreadableError,
    MissingKeysError,
    SyncCheckpointer,
    UnexpectedKeysError,
    build_checkpointer,
)
from ckpt_component.cli.app import main
from ckpt_component.formats.safe_unpickle import load_inert

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

HUGE = 1 << 50


@pytest.fixture
def ours() -> Any:
    with build_checkpointer("sync", ["checkpoint.durability=process_crash"]) as checkpointer:
        yield checkpointer


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.arange(6.0).view(2, 3), "n": 4}, checkpoint_id=tmp_path / "stock")
    return tmp_path / "stock"


@pytest.fixture
def native(tmp_path: Path, ours: SyncCheckpointer) -> Path:
    ours.save({"w": torch.arange(6.0).view(2, 3), "n": 4}, tmp_path / "native")
    return tmp_path / "native"


# Nothing in a file is ever called.


def evil_pickles(marker: Path) -> dict[str, bytes]:
    def stack_global(module: str, name: str) -> bytes:
        return b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)) + b"\x93"

    argument = b"\x8c" + bytes([len(str(marker))]) + str(marker).encode() + b"\x85R."
    metadata = "torch.distributed.checkpoint.metadata"
    return {
        "a function": pickle.dumps(Malicious(marker)),
        "by the opcodes of protocol 0": pickle.dumps(Malicious(marker), protocol=0),
        "a dotted gadget": b"\x80\x04" + stack_global("torch.serialization", "os.mkdir") + argument,
        "a dotted name of a known class": b"\x80\x04" + stack_global(metadata, "Metadata.__init__.__globals__") + b".",
        "an attribute of torch": b"\x80\x04" + stack_global("torch", "load") + argument,
        "getattr": b"\x80\x04" + stack_global("builtins", "getattr") + b".",
        "what getattr gives, called": b"\x80\x04"
        + stack_global("builtins", "getattr")
        + stack_global(metadata, "Metadata")
        + b"\x8c\x09__class__\x86R"
        + argument,
        "getattr of what is no class of DCP": b"\x80\x04"
        + stack_global("builtins", "getattr")
        + stack_global("os", "mkdir")
        + b"\x8c\x08__call__\x86R"
        + argument,
        "INST": b"(" + b"\x8c" + bytes([len(str(marker))]) + str(marker).encode() + b"iposix\nmkdir\n.",
        "a persistent id": b"\x80\x02\x8c\x01aQ.",
        "an extension": b"\x80\x02\x82\x01.",
        "a memo number that takes 32 GB": b"\x80\x02Nr\xff\xff\xff\x7f.",
        "bytes that are not there": b"\x80\x04\x8e" + struct.pack("<Q", HUGE) + b"x.",
        "something else": pickle.dumps({"a": 1}),
        "nothing": b"",
    }


@pytest.mark.parametrize("case", sorted(evil_pickles(Path("x"))))
def test_metadata_calls_nothing(case: str, stock: Path, ours: SyncCheckpointer, tmp_path: Path) -> None:
    marker = tmp_path / "called"
    (stock / ".metadata").write_bytes(evil_pickles(marker)[case])
    with pytest.raises(CheckpointCorruptError, match=r"\.metadata is not a DCP metadata file that can be trusted"):
        ours.load(stock)
    assert not marker.exists()


def test_members_of_enumerations_as_python_3_11_2_pickles_them(
    stock: Path, ours: SyncCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self._name_)))
    edit_metadata(stock, lambda metadata: None)
    assert b"getattr" in (stock / ".metadata").read_bytes()
    assert torch.equal(ours.load(stock)["w"], torch.arange(6.0).view(2, 3))


def test_a_pickle_cannot_change_the_classes_it_names() -> None:
    """BUILD with a state for attributes sets them on whatever is on the stack, a class too."""
    name = ("torch.distributed.checkpoint.metadata", "Metadata")
    code = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in name) + b"\x93"
    code += b"N}\x8c\x05taken\x88s\x86b."
    with contextlib.suppress(Exception):
        load_inert(code, [name])
    assert not hasattr(Metadata, "taken")
    with pytest.raises(TypeError):  # a second load has classes of its own
        load_inert(code, [name])


def test_an_object_item_calls_nothing(stock: Path, native: Path, ours: SyncCheckpointer, tmp_path: Path) -> None:
    marker = tmp_path / "called"
    stream = io.BytesIO()
    torch.save({"n": Malicious(marker)}, stream)
    evil = stream.getvalue()
    (stock / "evil.distcp").write_bytes(evil)

    def point_to_it(metadata: Metadata) -> None:
        metadata.storage_data[MetadataIndex("n")] = _StorageInfo("evil.distcp", 0, len(evil))

    edit_metadata(stock, point_to_it)
    with pytest.raises(CheckpointCorruptError, match=r"'n' in .*evil\.distcp cannot be loaded safely"):
        ours.load(stock)

    import zlib

    def replace_object(table: dict[str, Any]) -> None:
        table["extras"][0][2] = len(evil)
        table["sums"][-1] = zlib.crc32(evil)

    name = json.loads((native / "integrity-0.json").read_bytes())["extras"][0][0]
    (native / name).write_bytes(evil)
    note_file(native, name)
    edit_table(native, replace_object)
    with pytest.raises(CheckpointCorruptError, match=r"'n' in .* cannot be loaded safely"):
        ours.load(native)
    torch.save({"n": Malicious(marker)}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointLoadError, match="safe loading refuses"):
        ours.load(tmp_path / "evil.pt")
    assert not marker.exists()


def test_plans_of_megatron_are_inert_data(stock: Path, ours: SyncCheckpointer) -> None:
    from torch.distributed.checkpoint.filesystem import _StoragePrefix
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    def add_plans(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["w"]
        data = TensorWriteData(entry.chunks[0], entry.properties, entry.size)
        items = [WriteItem(MetadataIndex("w"), WriteItemType.TENSOR, tensor_data=data)]
        metadata.all_local_plans = [SavePlan(items, storage_data=_StoragePrefix("__0_"))]

    edit_metadata(stock, add_plans)
    assert torch.equal(ours.load(stock)["w"], torch.arange(6.0).view(2, 3))


# Nothing outside of the folder, and nothing but regular files.

PLACES = ["../outside", "/etc/hostname", "sub/file", "..", ".", "", "a\0b", "x" * 300, "\udcff\ud800", 7, None]


@pytest.mark.parametrize("name", PLACES, ids=lambda name: repr(name)[:20])
def test_names_stay_in_the_folder(name: Any, stock: Path, native: Path, ours: SyncCheckpointer) -> None:
    (stock.parent / "outside").write_bytes((stock / "__0_0.distcp").read_bytes())

    def rename(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            metadata.storage_data[index] = replace(info, relative_path=name)

    if name != "\udcff\ud800":  # pickle does not take it
        edit_metadata(stock, rename)
        with pytest.raises(CheckpointCorruptError, match="'[wn]' is in the file .*not a plain name"):
            ours.load(stock)
    edit_manifest(native, lambda manifest: manifest["files"].append({"name": name, "size": 1}))
    with pytest.raises(CheckpointCorruptError, match="not a plain name"):
        ours.load(native)
    edit_manifest(native, lambda manifest: manifest["files"].pop() and None)
    edit_table(native, lambda table: table["layout"]["files"].__setitem__(0, name))
    with pytest.raises(CheckpointCorruptError, match=r"integrity-0\.json is invalid"):
        ours.load(native)


def link(path: Path) -> None:
    kept = path.with_name("kept")
    path.rename(kept)
    path.symlink_to(kept)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


SPECIAL: list[Callable[[Path], None]] = [link, fifo, folder, device]


@pytest.mark.parametrize("replace_by", SPECIAL, ids=lambda made: made.__name__)
@pytest.mark.parametrize("name", ["manifest.json", "integrity-0.json", "__0_0.distcp", "__0_1.distcp"])
def test_no_special_file_in_ours(
    name: str, replace_by: Callable[[Path], None], native: Path, ours: SyncCheckpointer
) -> None:
    replace_by(native / name)
    with pytest.raises(CheckpointCorruptError, match=rf"{name} .*is not a regular file"):
        ours.load(native)


@pytest.mark.parametrize("replace_by", SPECIAL, ids=lambda made: made.__name__)
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_no_special_file_in_those_of_stock_dcp(
    name: str, replace_by: Callable[[Path], None], stock: Path, ours: SyncCheckpointer
) -> None:
    replace_by(stock / name)
    with pytest.raises(CheckpointCorruptError, match=name):
        ours.load(stock)


@pytest.mark.parametrize("replace_by", [link, fifo, device], ids=lambda made: made.__name__)
@pytest.mark.parametrize("name", ["file.pt", "file.safetensors"])
def test_no_special_file_by_itself(
    name: str, replace_by: Callable[[Path], None], ours: SyncCheckpointer, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "folder" / name
    path.parent.mkdir()
    save_file({"a": torch.ones(2)}, path) if name.endswith("safetensors") else torch.save({"a": torch.ones(2)}, path)
    replace_by(path)
    for target in (None, {"a": torch.zeros(2)}):
        with pytest.raises(CheckpointCorruptError, match="not a regular file"):
            ours.load(path, target)


def test_a_hard_link_is_a_file_like_any_other(native: Path, ours: SyncCheckpointer, tmp_path: Path) -> None:
    """So are the copies of `cp -al` made, and their bytes are verified all the same."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in native.iterdir():
        os.link(path, copy / path.name)
    assert torch.equal(ours.load(copy)["w"], torch.arange(6.0).view(2, 3))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads what it likes")
def test_what_may_not_be_read_is_not_called_corrupt(native: Path, ours: SyncCheckpointer) -> None:
    (native / "integrity-0.json").chmod(0)
    with pytest.raises(CheckpointUnreadableError, match="Permission denied"):
        ours.load(native)


def test_a_read_error_is_not_called_corrupt(
    native: Path, ours: SyncCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointUnreadableError, match=r"__0_\d\.distcp cannot be read: Input/output error") as caught:
        ours.load(native)
    assert caught.value.errno == 5


# Sizes, holes, overlaps, dtypes, keys. All before anything is allocated.


def chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Metadata], None]:
    """Have 'w' (2 x 3) made up of these boxes, all stored where its one chunk is."""

    def change(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata["w"]
        assert isinstance(entry, TensorStorageMetadata)
        (old,) = entry.chunks
        info = metadata.storage_data.pop(MetadataIndex("w", old.offsets))
        entry.chunks[:] = [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in boxes]
        for number, (at, _) in enumerate(boxes):
            metadata.storage_data[MetadataIndex("w", torch.Size(at), number)] = info

    return change


def stored(**values: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == "w":
                metadata.storage_data[index] = replace(info, **values)

    return change


def set_entry(**values: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for name, value in values.items():
            object.__setattr__(metadata.state_dict_metadata["w"], name, value)

    return change


def forget_storage(metadata: Metadata) -> None:
    metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn != "w"}


class NotAnInt(int):
    """Pickles as a reference to this class."""


BAD_METADATA: dict[str, tuple[Callable[[Metadata], None], str]] = {
    "a hole": (chunks(((0, 0), (1, 3))), "'w' in .* has a hole: its chunks hold 3 elements"),
    "an overlap": (chunks(((0, 0), (2, 2)), ((0, 1), (1, 2))), r"'w' in .*: the chunks at \(0, 0\) and at \(0, 1\)"),
    "an overlap that adds up": (chunks(((0, 0), (1, 3)), ((0, 0), (1, 2)), ((1, 0), (1, 1))), "stored twice|overlap"),
    "out of bounds": (chunks(((1, 0), (2, 3))), r"'w' in .*: the chunk of shape \(2, 3\) at \(1, 0\) lies outside"),
    "another number of dimensions": (chunks(((0,), (6,))), "'w'.* has the shape"),
    "no chunk": (chunks(), "has a hole"),
    "no storage": (forget_storage, "does not say where 'w' at .* is stored"),
    "a place before the file": (stored(offset=-1), "'w' is at -1 of"),
    "a place behind the file": (stored(offset=HUGE), "'w' is beyond the end of __0_0.distcp"),
    "a length of minus one": (stored(length=-1), "'w' is at"),
    "a huge length": (stored(length=HUGE), "'w' is beyond the end of __0_0.distcp"),
    "a length that is too short": (stored(length=20), "'w' has a chunk of 24 bytes"),
    "an offset that is a float": (stored(offset=0.0), "'w' is at 0.0"),
    "an offset that is True": (stored(offset=True), "'w' is at True"),
    "a file that is not there": (stored(relative_path="__9_9.distcp"), "no such regular file"),
    "a huge shape": (set_entry(size=torch.Size([HUGE, HUGE])), "'w' has the shape or place"),
    "another shape": (set_entry(size=torch.Size([2, 4])), "has a hole"),
    "a shape that is a list": (set_entry(size=[2, 3]), "'w' has the shape or place"),
    "a negative shape": (set_entry(size=(-2, -3)), "'w' has the shape or place"),
    "too many dimensions": (set_entry(size=(1,) * 100), "'w' has the shape or place"),
    "properties that are none": (set_entry(properties=3), "'w' has no properties"),
    "a class of somebody's": (set_entry(size=NotAnInt(3)), "NotAnInt"),
    "a key that is a number": (
        lambda metadata: metadata.state_dict_metadata.__setitem__(3, metadata.state_dict_metadata["w"]),  # type: ignore[index]
        "the key 3, which is no text",
    ),
    "no items": (lambda metadata: setattr(metadata, "state_dict_metadata", None), "no list of items"),
}


@pytest.mark.parametrize("case", sorted(BAD_METADATA))
def test_metadata_that_cannot_be(case: str, stock: Path, ours: SyncCheckpointer) -> None:
    change, message = BAD_METADATA[case]
    edit_metadata(stock, change)
    with pytest.raises(CheckpointCorruptError, match=message) as caught:
        ours.load(stock, {"w": torch.zeros(2, 3), "n": 0})
    assert "stock" in str(caught.value)


def test_chunks_that_make_up_the_tensor_load(stock: Path, ours: SyncCheckpointer) -> None:
    """The checks themselves let what is right through: two chunks, each stored."""
    halves = [torch.arange(3.0).view(1, 3), torch.arange(3.0, 6).view(1, 3)]
    blobs = []
    for half in halves:
        stream = io.BytesIO()
        torch.save(half, stream)
        blobs.append(stream.getvalue())
    (stock / "two.distcp").write_bytes(b"".join(blobs))

    def change(metadata: Metadata) -> None:
        chunks(((0, 0), (1, 3)), ((1, 0), (1, 3)))(metadata)
        position = 0
        for row, blob in enumerate(blobs):
            info = _StorageInfo("two.distcp", position, len(blob))
            metadata.storage_data[MetadataIndex("w", torch.Size([row, 0]), row)] = info
            position += len(blob)

    edit_metadata(stock, change)
    assert torch.equal(ours.load(stock)["w"], torch.arange(6.0).view(2, 3))


def test_a_chunk_of_another_dtype_or_shape(stock: Path, ours: SyncCheckpointer) -> None:
    stream = io.BytesIO()
    torch.save(torch.arange(6, dtype=torch.int32).view(2, 3), stream)
    (stock / "other.distcp").write_bytes(stream.getvalue())
    edit_metadata(stock, stored(relative_path="other.distcp", offset=0, length=len(stream.getvalue())))
    with pytest.raises(
        CheckpointCorruptError, match=r"'w' in .*other\.distcp is not the chunk that \.metadata describes"
    ):
        ours.load(stock)


def item(number: int, place: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(table: dict[str, Any]) -> None:
        table["layout"]["items"][number][place] = value

    return change


def at(*way: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(table: dict[str, Any]) -> None:
        for part in way[:-1]:
            table = table[part]
        table[way[-1]] = value

    return change


BAD_TABLES: dict[str, Callable[[dict[str, Any]], None]] = {
    "a file number of minus one": item(0, 0, -1),
    "a file number that is not there": item(0, 0, 99),
    "a place before the file": item(0, 1, -64),
    "a place behind the file": item(0, 1, HUGE),
    "a length of minus one": item(0, 2, -1),
    "a huge length": item(0, 2, HUGE),
    "a payload before the item": item(0, 3, -1),
    "a payload behind the item": item(0, 3, HUGE),
    "a dtype that is none": item(0, 4, "load"),
    "a dtype that reaches into torch": item(0, 4, "float32.itemsize"),
    "a huge shape": item(0, 5, [HUGE, HUGE, HUGE]),
    "a shape of nothing that overflows": item(0, 5, [0, 1 << 62, 1 << 62]),
    "a larger shape": item(0, 5, [HUGE]),
    "a shape with a float": item(0, 5, [2.0, 3]),
    "a shape with True": item(0, 5, [True, 3]),
    "no shape": item(0, 5, None),
    "one item less": lambda table: table["layout"]["items"].pop() and None,
    "one checksum less": lambda table: table["sums"].pop() and None,
    "a checksum that is a text": at("sums", 0, value="1"),
    "a key of no item": at("layout", "keys", 0, 1, value=-1),
    "a key of an object's item": at("layout", "keys", 0, 1, value=1),
    "a key that is a number": at("layout", "keys", 0, 0, value=3),
    "a key of lists": at("layout", "keys", 0, 0, value=[["w"]]),
    "an object of a tensor's item": at("layout", "objects", 0, 1, value=0),
    "a part out of bounds": at("layout", "keys", 0, value=[["w"], 0, [2, 3], [1, 0]]),
    "a part with a hole": at("layout", "keys", 0, value=[["w"], 0, [4, 3], [0, 0]]),
    "a part of other dimensions": at("layout", "keys", 0, value=[["w"], 0, [6], [0]]),
    "a part of a huge whole": at("layout", "keys", 0, value=[["w"], 0, [HUGE, HUGE], [0, 0]]),
    "a container of no kind": at("layout", "containers", value=[[["w"], "bomb"]]),
    "a dict of no class": at("layout", "classes", value=[[["w"], "defaultdict eval"]]),
    "an extra in no file": at("extras", 0, 0, value="../x"),
    "an extra of minus one bytes": at("extras", 0, 2, value=-1),
    "no layout": lambda table: table.pop("layout") and None,
    "a layout that is a list": at("layout", value=[]),
    "items that are numbers": at("layout", "items", value=[1]),
}


@pytest.mark.parametrize("case", sorted(BAD_TABLES))
def test_a_table_that_cannot_be(case: str, native: Path, ours: SyncCheckpointer) -> None:
    edit_table(native, BAD_TABLES[case])
    for target in (None, {"w": torch.zeros(2, 3), "n": 0}):
        with pytest.raises(CheckpointCorruptError) as caught:
            ours.load(native, target)
        assert "native" in str(caught.value)


BAD_MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no files": (lambda manifest: manifest.pop("files") and None, "lists no files"),
    "files that are numbers": (at("files", value=[1, 2]), "not a plain name"),
    "a size of minus one": (at("files", 0, "size", value=-1), "gives -1 as the size"),
    "a size that is a text": (at("files", 0, "size", value="7"), "gives .7. as the size"),
    "a size beyond all bounds": (at("files", 0, "size", value=1 << 63), "the size"),
    "a file twice": (lambda manifest: manifest["files"].append(manifest["files"][0]), "twice"),
    "no ranks": (at("world_size", value=0), "gives 0 as the world_size"),
    "more ranks than files": (
        lambda manifest: manifest.update(files=manifest["files"][:1], world_size=2),
        "gives 2 as the world_size, and lists only 1 files",
    ),
    "a billion ranks": (at("world_size", value=1 << 30), "as the world_size, and lists only"),
    "more ranks than bytes in a disk": (at("world_size", value=1 << 62), "as the world_size, and lists only"),
    "a format of nobody's": (at("format", value=["dcp"]), "the format"),
    "another release's": (at("version", value=99), "this release of ckpt_component reads version 1"),
    "no manifest at all": (lambda manifest: [1, 2], "holds a list, not a manifest"),
}


@pytest.mark.parametrize("case", sorted(BAD_MANIFESTS))
def test_a_manifest_that_cannot_be(case: str, native: Path, ours: SyncCheckpointer) -> None:
    change, message = BAD_MANIFESTS[case]
    edit_manifest(native, change)
    kinds = CheckpointLoadError if case in ("another release's", "a format of nobody's") else CheckpointCorruptError
    with pytest.raises(kinds, match=message):
        ours.load(native)
    if case in ("a billion ranks", "more ranks than bytes in a disk"):
        with pytest.raises(kinds, match=message):
            ours.verify(native)
        with pytest.raises(SystemExit, match="1"):
            main(["verify", str(native)])


def test_json_that_is_too_deep(native: Path, ours: SyncCheckpointer) -> None:
    (native / "manifest.json").write_bytes(b"[" * 1_000_000)
    with pytest.raises(CheckpointCorruptError, match=r"manifest\.json is not a complete manifest"):
        ours.load(native)


def header_file(path: Path, header: Any, data: bytes = bytes(8), length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(shape: list[Any], begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BAD_HEADERS: dict[str, tuple[Any, str]] = {
    "a hole at the start": ({"a": entry([1], 4, 8)}, "leave a hole"),
    "a hole between": ({"a": entry([0], 0, 0), "b": entry([1], 4, 8)}, "leave a hole"),
    "an overlap": ({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, "overlap"),
    "an end before the file's": ({"a": entry([1], 0, 4)}, "offsets end at 4"),
    "an end behind the file's": ({"a": entry([4], 0, 16)}, "offsets end at 16"),
    "a size that is not shape times dtype": ({"a": entry([3], 0, 8)}, "do not fit"),
    "a huge shape": ({"a": entry([HUGE, HUGE], 0, 8)}, "the shape"),
    "a shape of nothing that overflows": ({"a": entry([0, 1 << 63], 0, 0)}, "the shape"),
    "a negative shape": ({"a": entry([-2, -1], 0, 8)}, "the shape"),
    "a shape that is a text": ({"a": entry("2", 0, 8)}, "the shape"),  # type: ignore[arg-type]
    "offsets that are floats": ({"a": entry([2], 0.0, 8.0)}, "the offsets"),
    "negative offsets": ({"a": entry([2], -8, 0)}, "the offsets"),
    "a dtype that is a list": ({"a": entry([2], 0, 8, ["F32"])}, "the dtype"),
    "an entry that is a number": ({"a": 3}, "the dtype None"),
    "a header that is a list": ([1], "not JSON"),
    "no JSON": (b"{", "not JSON"),
    "JSON that is too deep": (b"[" * 200_000, "not JSON"),
    "a key twice": (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":3}', "a key occurs twice"),
}


@pytest.mark.parametrize("case", sorted(BAD_HEADERS))
def test_a_safetensors_header_that_cannot_be(case: str, ours: SyncCheckpointer, tmp_path: Path) -> None:
    header, message = BAD_HEADERS[case]
    header_file(tmp_path / "x.safetensors", header)
    with pytest.raises(CheckpointCorruptError, match=message):
        ours.load(tmp_path / "x.safetensors")


def test_a_safetensors_header_that_is_not_there(ours: SyncCheckpointer, tmp_path: Path) -> None:
    for length in (9, 1 << 40, (1 << 64) - 1):
        header_file(tmp_path / "x.safetensors", b"{}", data=b"", length=length)
        with pytest.raises(CheckpointCorruptError, match="claims a header of"):
            ours.load(tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").write_bytes(b"1234")
    with pytest.raises(CheckpointCorruptError, match="too short"):
        ours.load(tmp_path / "x.safetensors")


def rezip(path: Path, compression: int, change: Callable[[str, bytes], bytes] = lambda name, data: data) -> None:
    with zipfile.ZipFile(path) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members:
            archive.writestr(name, change(name, data))


@pytest.mark.parametrize("target", [None, {"a": torch.zeros(4)}], ids=["new", "mapped"])
def test_archives_that_torch_would_unpack(target: Any, ours: SyncCheckpointer, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(4.0)}, path)
    rezip(path, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointCorruptError, match="compressed"):
        ours.load(path, target)
    torch.save({"a": torch.arange(4.0)}, path)

    def larger(name: str, data: bytes) -> bytes:
        return data.replace(b"K\x04tq", b"M\x00\x7ftq") if name.endswith("data.pkl") else data

    rezip(path, zipfile.ZIP_STORED, larger)
    # torch 2.7 makes a storage of it that reaches into other memory.
    with pytest.raises(
        CheckpointCorruptError, match=r"x\.pt claims a storage of 130048 bytes in .*, and 16 are stored"
    ):
        ours.load(path, target)
    torch.save({"a": torch.arange(4.0)}, path)
    whole = path.read_bytes()
    # The directory claims more than the file has.
    place = whole.rindex(b"PK\x01\x02", 0, whole.rindex(b"data/0"))
    path.write_bytes(whole[: place + 20] + struct.pack("<LL", 1 << 31, 1 << 31) + whole[place + 28 :])
    with pytest.raises(CheckpointCorruptError, match="claims"):
        ours.load(path, target)


def test_a_tensor_that_repeats_itself_to_no_end(ours: SyncCheckpointer, tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1).expand(1 << 40)}, tmp_path / "x.pt")
    for target in (None, {"a": None}):
        with pytest.raises(CheckpointCorruptError, match=r"'a' in .*x\.pt has the shape \(1099511627776,\)"):
            ours.load(tmp_path / "x.pt", target)
    torch.save({"a": torch.zeros(1).expand(1000)}, tmp_path / "x.pt")
    assert ours.load(tmp_path / "x.pt")["a"].shape == (1000,)


def test_dtypes_shapes_and_keys_are_listed(native: Path, stock: Path, ours: SyncCheckpointer) -> None:
    for path in (native, stock):
        for dtype in (torch.float64, torch.bfloat16, torch.int32):
            with pytest.raises(CheckpointLoadError, match=r"'w' is torch\.\w+ in the target and torch\.float32 in"):
                ours.load(path, {"w": torch.zeros(2, 3, dtype=dtype)})
        for shape in ((3, 2), (6,), (2, 3, 1), ()):
            with pytest.raises(CheckpointLoadError, match="'w' has shape"):
                ours.load(path, {"w": torch.zeros(shape)})
        with pytest.raises(MissingKeysError, match=r"is missing keys: \['x', 'y'\]; strict=False"):
            ours.load(path, {"w": torch.zeros(2, 3), "x": torch.zeros(1), "y": 3}, strict=True)
        target = {"w": torch.zeros(2, 3)}
        assert ours.load(path, target, strict=True) is target  # a part of a checkpoint may be loaded
        target["w"].zero_()
        with pytest.raises(UnexpectedKeysError, match="keys that the target does not have: n") as caught:
            ours.load(path, target, allow_unexpected=False)
        assert caught.value.keys == ["n"]
        assert not target["w"].any()  # refused before anything was read


@pytest.mark.parametrize("value", [None, -1, HUGE, "x", [], {}, 1.5, True], ids=str)
def test_nothing_else_than_our_errors_comes_out_of_forged_tables(
    value: Any, native: Path, ours: SyncCheckpointer
) -> None:
    """Every value of the table, replaced by a wrong one, with all checksums right."""
    whole = {path.name: path.read_bytes() for path in native.iterdir()}
    table = json.loads(whole["integrity-0.json"])
    ways = [way for way in every_place(table) if way]
    tried = 0
    for way in ways:
        edit_table(native, at(*way, value=value))
        try:
            ours.load(native)
        except CheckpointError:
            tried += 1
        for name, data in whole.items():
            (native / name).write_bytes(data)
    assert tried > len(ways) / 8


@pytest.mark.parametrize("value", [None, -1, 1, HUGE, "x", []], ids=str)
def test_a_forged_index_of_torch_save_gives_our_errors_or_the_state(value: Any, tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.arange(6.0).view(2, 3), "v": torch.arange(4), "n": 4}
    with build_checkpointer("sync", ["checkpoint/writer=torch_save"]) as ours:
        ours.save(state, tmp_path / "one")
        whole = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
        table: dict[str, Any] = {}
        edit_table(tmp_path / "one", table.update)
        refused = 0
        for way in filter(None, every_place(table)):
            for name, data in whole.items():
                (tmp_path / "one" / name).write_bytes(data)
            edit_table(tmp_path / "one", at(*way, value=value))
            for target in (None, {"w": torch.zeros(2, 3), "v": torch.zeros(4, dtype=torch.int64), "n": 0}):
                try:
                    loaded = ours.load(tmp_path / "one", target)
                except CheckpointError:
                    refused += 1
                else:
                    assert loaded.keys() == state.keys() and loaded["n"] == 4, way
                    assert all(torch.equal(loaded[key], state[key]) for key in ("w", "v")), way
        assert refused > 10


def test_bytes_that_the_index_does_not_list_are_not_loaded(tmp_path: Path) -> None:
    def forget_one(table: dict[str, Any]) -> None:
        del table["layout"]["items"][0], table["sums"][0]

    with build_checkpointer("sync", ["checkpoint/writer=torch_save"]) as ours:
        ours.save({"w": torch.arange(6.0), "v": torch.arange(4)}, tmp_path / "one")
        edit_table(tmp_path / "one", forget_one)
        with pytest.raises(CheckpointCorruptError, match="has bytes that the index does not list"):
            ours.load(tmp_path / "one")


def every_place(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [way]
    if isinstance(value, dict):
        found += [inner for key, below in value.items() for inner in every_place(below, (*way, key))]
    elif isinstance(value, list):
        found += [inner for number, below in enumerate(value) for inner in every_place(below, (*way, number))]
    return found
