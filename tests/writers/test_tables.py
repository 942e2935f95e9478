"""What is written about the items: the index of stock DCP, pickled in batches, and the table for the writer process."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from ckpt_component import CheckpointStageError
from ckpt_component.core.state.flatten import flatten
from ckpt_component.core.state.structure import Structure
from ckpt_component.core.writing.request import WriteTable
from ckpt_component.writers.dcp import DcpWriter
from ckpt_component.writers.metadata_pickle import metadata_of


def rank_index_of(rank: int, tensors: int, offset: int = 0) -> dict[str, Any]:
    name = f"__{rank}_0.distcp"
    rows = [
        [["m", f"w{number}"], "float32", [8, number], [offset, 0], [4, number], name, 64 * number, 60]
        for number in range(tensors)
    ]
    return {"tensors": rows, "objects": [[["o", rank], name, 9, 9]], "lists": [["o"]], "elsewhere": []}


@pytest.mark.parametrize("plain", [False, True], ids=["in batches", "of another release"])
def test_metadata_is_that_of_all_ranks(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if plain:
        monkeypatch.setattr(Metadata, "__getstate__", lambda self: (None, vars(self)), raising=False)
    row = [["m", "w1"], "float32", [8, 1], [0, 0], [4, 1], "twice", 0, 60]
    tied = {"tensors": [row], "objects": [], "lists": [], "elsewhere": [["m", "w2"]]}
    data = metadata_of([rank_index_of(0, 450), rank_index_of(1, 450, offset=4), tied])
    monkeypatch.undo()
    found = pickle.loads(data)
    if plain:
        found.__dict__.update(found.__dict__.pop("__dict__", {}))
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
    for one, other in zip(found.lanes, table.lanes, strict=True):
        for lane, known in zip(one, other, strict=True):
            assert (lane.file, lane.start, lane.end, lane.first) == (known.file, known.start, known.end, known.first)
            assert list(lane.places) == list(known.places)
