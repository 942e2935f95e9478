"""What every writer must do, as tests: derive from `WriterContract`, and pytest runs them with your writer.

    class TestMine(WriterContract):
        @pytest.fixture
        def writer(self):
            return MyWriter(workers=2)

What a format cannot hold it must refuse by key; the tests find out what that is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ...core.commit.names import MANIFEST, integrity_name
from ...core.writing.request import EncodedSave
from ...errors import CheckpointCorruptError, CheckpointStageError
from ...formats.writer import FormatPlan, Writer
from ...stagers.base import Snapshot
from ...stagers.shared_memory import LiveStager, SharedMemoryStager
from ...state.structure import Structure
from .connected_parts import ConnectedParts, connect, differences, example_state, holds_objects, load, structure_of


class WriterContract:
    """Tests of a writer. A subclass defines the fixture `writer`, of a writer with two workers."""

    @pytest.fixture
    def writer(self) -> Writer:
        """A new writer with its settings and `workers=2`."""
        raise NotImplementedError("define a fixture `writer` that returns your writer, with two workers")

    def test_a_checkpoint_is_the_state(self, writer: Writer, tmp_path: Path) -> None:
        objects = holds_objects(writer)
        with ConnectedParts(tmp_path, SharedMemoryStager(), writer) as parts:
            for number in (1, 2):
                self._check(parts, parts.take(example_state(number, objects=objects)), number, objects)

    def test_it_may_be_written_from_the_tensors_themselves(self, writer: Writer, tmp_path: Path) -> None:
        objects = holds_objects(writer)
        with ConnectedParts(tmp_path, LiveStager(), writer) as parts:
            self._check(parts, parts.take(example_state(1, objects=objects)), 1, objects)

    def test_other_structures_follow(self, writer: Writer, tmp_path: Path) -> None:
        with ConnectedParts(tmp_path, SharedMemoryStager(), writer) as parts:
            for size in (3, 5000, 3):
                state = {"weight": torch.full((size,), float(size)), "layer": {"bias": torch.ones(1, size)}}
                snapshot = parts.take(state)
                assert not differences(parts.stored(snapshot), state)
                snapshot.release()

    def test_a_value_is_stored_or_refused_by_its_key(self, writer: Writer, tmp_path: Path) -> None:
        values: list[Any] = [7, "text", [1, None], {"deep": {1: 2.5}}, (1, 2), {3}]
        with ConnectedParts(tmp_path, SharedMemoryStager(), writer) as parts:
            for value in values:
                state = {"weight": torch.ones(3), "layer": {"value": value}}
                try:
                    snapshot = parts.take(state)
                except CheckpointStageError as error:
                    assert "layer.value" in str(error)
                    continue
                assert not differences(parts.stored(snapshot), state)
                snapshot.release()

    def test_objects_are_those_of_their_moment(self, writer: Writer, tmp_path: Path) -> None:
        if not holds_objects(writer):
            pytest.skip("this format holds tensors only")
        with ConnectedParts(tmp_path, SharedMemoryStager(arenas=2), writer) as parts:
            state = {"weight": torch.ones(3), "step": 1, "history": ["first"]}
            one = parts.take(state)
            state["step"] = 2
            state["history"].append("second")  # type: ignore[attr-defined]
            two = parts.take(state)
            assert not differences(parts.stored(two), state)
            assert not differences(parts.stored(one), {**state, "step": 1, "history": ["first"]})
            one.release()
            two.release()

    def test_every_byte_of_the_files_has_one_place(self, writer: Writer, tmp_path: Path) -> None:
        plan, encoded = self._plan(writer, example_state(1, objects=holds_objects(writer)))
        layout, table = plan.layout, encoded.table
        end = 0
        for file in sorted(layout.files, key=lambda file: file.base):
            assert file.base >= end, f"{file.name} overlaps another file"
            assert file.base % os.sysconf("SC_PAGE_SIZE") == 0, f"{file.name} does not begin with a page"
            end = file.base + file.size
        assert end <= layout.arena_bytes
        assert [(spec.name, spec.base, spec.size) for spec in table.files] == [
            (file.name, file.base, file.size) for file in layout.files
        ]
        ends = dict.fromkeys(range(len(layout.files)), 0)
        for item in layout.items:
            assert ends[item.file] <= item.offset <= item.payload
            ends[item.file] = item.offset + item.length
            assert item.payload + item.nbytes <= ends[item.file] <= layout.files[item.file].size
        assert {item.stored for item in layout.items} == {*range(len(layout.stored))}
        assert len(layout.items) == len(layout.stored) == table.item_count
        extents = sorted((extent.file, extent.start, extent.end) for group in table.extents for extent in group)
        written = dict.fromkeys(range(len(layout.files)), 0)
        for number, start, stop in extents:
            assert start == written[number], "a byte that no extent writes, or that two write"
            written[number] = stop
        assert written == {number: file.size for number, file in enumerate(layout.files)}

    def test_the_structure_alone_decides_the_layout(self, writer: Writer, tmp_path: Path) -> None:
        objects = holds_objects(writer)
        one, two = (self._plan(writer, example_state(number, objects=objects))[0] for number in (1, 2))
        assert one.layout.files == two.layout.files
        assert [*one.layout.items] == [*two.layout.items]
        assert [*one.layout.fixed_parts()] == [*two.layout.fixed_parts()]

    def test_ranks_have_files_with_names_of_their_own(self, writer: Writer, tmp_path: Path) -> None:
        structure = structure_of(writer, {"weight": torch.ones(100), "bias": torch.ones(100)})
        names = [self._files(writer.plan(structure, rank), structure) for rank in (0, 1, 11)]
        assert all(names)
        assert len(set().union(*names)) == sum(map(len, names))

    def test_workers_share_the_bytes(self, writer: Writer, tmp_path: Path) -> None:
        _, encoded = self._plan(writer, {f"weight{number}": torch.ones(5000) for number in range(8)})
        shares = [sum(extent.end - extent.start for extent in group) for group in encoded.table.extents]
        assert len(shares) == writer.workers == 2
        assert max(shares) < 0.7 * sum(shares), f"bytes of each worker: {shares}"

    def test_memory_that_tensors_share_is_stored_once(self, writer: Writer, tmp_path: Path) -> None:
        weight = torch.randn(10_000)
        state = {"weight": weight, "tied": weight, "again": weight}
        with ConnectedParts(tmp_path, SharedMemoryStager(), writer) as parts:
            snapshot = parts.take(state)
            assert snapshot.layout.payload_bytes == 40_000
            path = parts.save(snapshot)
            assert sum(each.stat().st_size for each in Path(path).iterdir()) < 2 * 40_000
            assert not differences(load(path), state)
            snapshot.release()

    def test_a_damaged_byte_is_found(self, writer: Writer, tmp_path: Path) -> None:
        with ConnectedParts(tmp_path, SharedMemoryStager(), writer) as parts:
            snapshot = parts.take({f"weight{number}": torch.randn(30 + number) for number in range(4)})
            path, layout = parts.save(snapshot), snapshot.layout
            assert load(path).keys() == {f"weight{number}" for number in range(4)}
            for item in layout.items:
                for place in (item.payload, item.payload + item.nbytes // 2, item.payload + item.nbytes - 1):
                    with open(os.path.join(path, layout.files[item.file].name), "r+b") as file:
                        file.seek(place)
                        byte = file.read(1)
                        file.seek(place)
                        file.write(bytes([byte[0] ^ 1]))
                        file.flush()
                        with pytest.raises(CheckpointCorruptError):
                            load(path)
                        file.seek(place)
                        file.write(byte)
            assert load(path).keys() == {f"weight{number}" for number in range(4)}
            snapshot.release()

    def test_the_index_takes_no_name_of_another_file(self, writer: Writer, tmp_path: Path) -> None:
        structure = structure_of(writer, {"weight": torch.ones(100)})
        plans = [writer.plan(structure, rank) for rank in (0, 1)]
        taken = {MANIFEST, *map(integrity_name, (0, 1))}.union(*(self._files(plan, structure) for plan in plans))
        objects = [None] * len(structure.object_paths)
        index: Mapping[str, bytes] = writer.index([plan.encode_objects(objects).rank_index() for plan in plans])
        assert not {*index} & taken
        assert all(isinstance(data, bytes) for data in index.values())

    @staticmethod
    def _plan(writer: Writer, state: Mapping[str, Any]) -> tuple[FormatPlan, EncodedSave]:
        """The plan for a state, and what a save of it writes."""
        inspected = connect(LiveStager(), writer).inspect(state)
        plan = writer.plan(inspected.structure, 0)
        return plan, plan.encode_objects(inspected.flat.objects)

    @staticmethod
    def _files(plan: FormatPlan, structure: Structure) -> set[str]:
        encoded = plan.encode_objects([None] * len(structure.object_paths))
        return {spec.name for spec in encoded.table.files} | {blob.file for blob in encoded.object_blobs}

    @staticmethod
    def _check(parts: ConnectedParts, snapshot: Snapshot, number: int, objects: bool) -> None:
        assert not differences(parts.stored(snapshot), example_state(number, objects=objects))
        snapshot.release()
