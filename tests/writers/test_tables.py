"""What is written about the items: the index of stock DCP, pickled in batches, and the table for the writer process."""

from __future__ import annotations

import json
import pickle
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_component import CheckpointStageError
from ckpt_component.core.writing.request import WriteTable
from ckpt_component.formats.dcp import DcpWriter
from ckpt_component.formats.dcp_pickle import metadata_of
from ckpt_component.state.flatten import flatten
from ckpt_component.state.structure import Structure


def rank_index_of(rank: int, tensors: int, offset: int = 0) -> dict[str, Any]:
    name = f"__{rank}_0.distcp"
    rows = [
        [["m", f"w{number}"], "float32", [8, number], [offset, 0], [4, number], name, 64 * number, 60]
        for number in range(tensors)
    ]
    return {"tensors": rows, "objects": [[["o", rank], name, 9, 9]], "lists": [["o"]], "elsewhere": []}


def test_metadata_is_that_of_all_ranks() -> None:
    row = [["m", "w1"], "float32", [8, 1], [0, 0], [4, 1], "twice", 0, 60]
    tied = {"tensors": [row], "objects": [], "lists": [], "elsewhere": [["m", "w2"]]}
    data = metadata_of([rank_index_of(0, 450), rank_index_of(1, 450, offset=4), tied])
    found = pickle.loads(data)
    assert type(found) is Metadata and found.storage_meta is None
    assert set(found.state_dict_metadata) == {*(f"m.w{number}" for number in range(450)), "o.0", "o.1"}
    assert isinstance(found.state_dict_metadata["o.1"], BytesStorageMetadata)
    for number in (0, 199, 200, 449):
        entry = found.state_dict_metadata[f"m.w{number}"]
        assert isinstance(entry, TensorStorageMetadata)
        assert entry.size == torch.Size([8, number]) and entry.properties.dtype is torch.float32
        assert [(chunk.offsets, chunk.sizes) for chunk in entry.chunks] == [
            (torch.Size([offset, 0]), torch.Size([4, number])) for offset in (0, 4)
        ]
        for rank, offset in enumerate((0, 4)):
            place = found.storage_data[MetadataIndex(f"m.w{number}", torch.Size([offset, 0]), rank)]
            assert (place.relative_path, place.offset, place.length) == (f"__{rank}_0.distcp", 64 * number, 60)
    assert len(found.storage_data) == 902
    assert found.planner_data["m.w3"] == ("m", "w3") and found.planner_data["o.1"] == ("o", 1)


def attributes(value: Any) -> Any:
    """A value as plain data, with the attributes of dataclasses: `==` leaves out some, such as a part's number."""
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), {field.name: attributes(getattr(value, field.name)) for field in fields(value)}
    if type(value) is dict:
        return [(attributes(key), attributes(each)) for key, each in value.items()]
    return type(value), [attributes(each) for each in value] if type(value) is list else value


def test_torch_reads_the_metadata_that_it_would_have_made() -> None:
    name, size = "__0_0.distcp", torch.Size
    index = rank_index_of(0, 2)
    index["tensors"] = [row_of(f"w{dtype}", dtype, [3, 2], [0, 0], [3, 2]) for dtype in ("bfloat16", "uint8")]
    index["tensors"] += [row_of("one", "int64", [], [], [])]
    index["tensors"] += [row_of("parts", "float64", [8, 2], [start, 0], [4, 2]) for start in (0, 4)]
    found = pickle.loads(metadata_of([index]))

    def entry(dtype: torch.dtype, whole: list[int], *offsets: list[int], part: list[int]) -> TensorStorageMetadata:
        chunks = [ChunkStorageMetadata(size(offset), size(part)) for offset in offsets]
        return TensorStorageMetadata(TensorProperties(dtype=dtype), size(whole), chunks)

    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        "wbfloat16": entry(torch.bfloat16, [3, 2], [0, 0], part=[3, 2]),
        "wuint8": entry(torch.uint8, [3, 2], [0, 0], part=[3, 2]),
        "one": entry(torch.int64, [], [], part=[]),
        "parts": entry(torch.float64, [8, 2], [0, 0], [4, 0], part=[4, 2]),
        "o.0": BytesStorageMetadata(),
    }
    places = {
        MetadataIndex(key, chunk.offsets, number): _StorageInfo(name, 0, 60)
        for key, tensor in entries.items()
        if isinstance(tensor, TensorStorageMetadata)
        for number, chunk in enumerate(tensor.chunks)
    }
    places[MetadataIndex("o.0")] = _StorageInfo(name, 9, 9)
    paths = {"wbfloat16": ("wbfloat16",), "wuint8": ("wuint8",), "one": ("one",), "parts": ("parts",), "o.0": ("o", 0)}
    expected = Metadata(entries, paths, places)
    assert found == expected and attributes(found) == attributes(expected)
    assert pickle.loads(pickle.dumps(found)) == expected


def test_metadata_of_nothing() -> None:
    found = pickle.loads(metadata_of([{"tensors": [], "objects": [], "lists": [], "elsewhere": []}]))
    assert (found.state_dict_metadata, found.planner_data, found.storage_data) == ({}, {}, {})


def row_of(key: str, dtype: str, whole: list[int], offsets: list[int], part: list[int]) -> list[Any]:
    return [[key], dtype, whole, offsets, part, "__0_0.distcp", 0, 60]


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (row_of("w", "int8", [8], [0], [4]), row_of("v", "int8", [1], [0], [1]), "'w' has a hole.* 4 elements.* 8"),
        (
            row_of("w", "int8", [8], [0], [4]),
            row_of("w", "int8", [8], [3], [5]),
            r"'w': .*\(0,\) and at \(3,\) overlap",
        ),
        (row_of("w", "int8", [8], [1], [8]), row_of("v", "int8", [1], [0], [1]), "'w': .* lies outside"),
        (row_of("w", "int8", [8], [0], [8]), row_of("w", "int8", [9], [0], [9]), r"'w' is int8 \(8,\) .* int8 \(9,\)"),
        (row_of("w", "int8", [8], [0], [8]), row_of("w", "int4", [8], [0], [8]), r"'w' is int4 \(8,\) .* int8 \(8,\)"),
        (row_of("w", "int8", [8], [0], [8]), row_of("o", "int8", [8], [0], [8]), "'o' is a tensor .* Python object"),
        (row_of("w", "int8", [8], [0], [8]), row_of("v", "int8", [8], [0], [8]), "'x' is spread .* no rank"),
    ],
)
def test_no_index_is_made_of_tensors_that_are_not_whole(first: list[Any], second: list[Any], text: str) -> None:
    one = {"tensors": [first], "objects": [[["o"], "__0_1.distcp", 0, 9]], "lists": [], "elsewhere": []}
    other = {"tensors": [second], "objects": [], "lists": [], "elsewhere": [["x"]] if "'x'" in text else []}
    with pytest.raises(CheckpointStageError, match=text):
        DcpWriter().index([one, other])


def test_a_table_comes_to_the_writer_process_as_it_is() -> None:
    state = {f"w{number}": torch.ones(number) for number in range(30)}
    flat = flatten({**state, "n": 1})
    table = DcpWriter(workers=3).plan(Structure(flat), 0).encode_objects(flat.objects).table
    plain, parts = table.to_parts()
    plain = json.loads(json.dumps(plain))
    assert plain["sizes"] == [len(part) for part in parts]
    found = WriteTable.from_parts(plain, [memoryview(bytes(part)) for part in parts])
    assert (found.files, found.item_count, found.checksum) == (table.files, table.item_count, table.checksum)
    assert bytes(found.description) == table.description and json.loads(bytes(found.description))["format"] == "dcp"
    for one, other in zip(found.extents, table.extents, strict=True):
        for extent, known in zip(one, other, strict=True):
            assert (extent.file, extent.start, extent.end, extent.first) == (
                known.file,
                known.start,
                known.end,
                known.first,
            )
            assert list(extent.places) == list(known.places)
