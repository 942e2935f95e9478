"""Our writers do what the graph relies on, and each test of the contract finds a writer that does not."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_component import CheckpointStageError
from ckpt_component.core.image.layout import Layout
from ckpt_component.core.writing.request import EncodedSave, places_of
from ckpt_component.formats.writer import FormatPlan
from ckpt_component.state.structure import Structure
from ckpt_component.testing.conformance import WriterContract, registered
from ckpt_component.writers import DcpWriter, SafetensorsWriter, Writer

WRITERS = registered("writer")


class TestWriters(WriterContract):
    @pytest.fixture(params=WRITERS)
    def writer(self, request: pytest.FixtureRequest) -> Writer:
        made: Writer = WRITERS[request.param]()
        return made


class Changed(FormatPlan):
    """A plan of another writer, with something changed.

    Args:
        plan: the plan
        layout: another layout, or None
        encode: returns what a save writes; None: as the plan says
    """

    def __init__(self, plan: FormatPlan, layout: Layout | None = None, encode: Any = None) -> None:
        self.layout = layout or plan.layout
        self.encode_objects = encode or plan.encode_objects  # type: ignore[method-assign]

    def encode_objects(self, objects: Sequence[Any]) -> EncodedSave:
        raise NotImplementedError  # the attribute is in its place


class Shifted(DcpWriter):
    """Describes tensors one byte beside where they are."""

    def plan(self, structure: Structure, rank: int) -> FormatPlan:
        plan = super().plan(structure, rank)
        items = [item._replace(payload=item.payload - 1) for item in plan.layout.items]
        return Changed(plan, replace(plan.layout, items=items))


class Unordered(DcpWriter):
    """Lists the items in no order, which a copy into an arena does not notice."""

    def plan(self, structure: Structure, rank: int) -> FormatPlan:
        plan = super().plan(structure, rank)
        return Changed(plan, replace(plan.layout, items=plan.layout.items[::-1]))


class OnePlan(DcpWriter):
    """Has the plan of the first structure for all."""

    first: FormatPlan | None = None

    def plan(self, structure: Structure, rank: int) -> FormatPlan:
        self.first = self.first or super().plan(structure, rank)
        return self.first


class Nameless(SafetensorsWriter):
    """Does not say which value it refuses."""

    def plan(self, structure: Structure, rank: int) -> FormatPlan:
        try:
            return super().plan(structure, rank)
        except CheckpointStageError as error:
            raise CheckpointStageError("some values are not tensors") from error


class FirstObjects(DcpWriter):
    """Stores the objects of the first save in all."""

    def plan(self, structure: Structure, rank: int) -> FormatPlan:
        plan, encoded = super().plan(structure, rank), list[EncodedSave]()

        def encode(objects: Sequence[Any]) -> EncodedSave:
            encoded.append(plan.encode_objects(objects))
            return encoded[0]

        return Changed(plan, encode=encode)


class Overlapping(DcpWriter):
    """Lays one file over the other."""

    def plan(self, structure: Structure, rank: int) -> FormatPlan:
        plan = super().plan(structure, rank)
        files = tuple(replace(file, base=0) for file in plan.layout.files)
        return Changed(plan, replace(plan.layout, files=files))


class Gapped(DcpWriter):
    """Does not write the end of a file."""

    def plan(self, structure: Structure, rank: int) -> FormatPlan:
        plan = super().plan(structure, rank)

        def encode(objects: Sequence[Any]) -> EncodedSave:
            encoded = plan.encode_objects(objects)
            extents = [[replace(extent, end=extent.end - 1) for extent in group] for group in encoded.table.extents]
            return replace(encoded, table=replace(encoded.table, extents=extents))

        return Changed(plan, encode=encode)


class Capricious(DcpWriter):
    """Gives its files other names each time."""

    def plan(self, structure: Structure, rank: int) -> FormatPlan:
        return super().plan(structure, next(_numbers))


class Rankless(DcpWriter):
    """Has the same file names on each rank."""

    def plan(self, structure: Structure, rank: int) -> FormatPlan:
        return super().plan(structure, 0)


class Alone(DcpWriter):
    """Leaves all bytes to one worker."""

    def plan(self, structure: Structure, rank: int) -> FormatPlan:
        plan = super().plan(structure, rank)

        def encode(objects: Sequence[Any]) -> EncodedSave:
            encoded = plan.encode_objects(objects)
            extents = [[extent for group in encoded.table.extents for extent in group]]
            return replace(encoded, table=replace(encoded.table, extents=extents))

        return Changed(plan, encode=encode)


class Untied(DcpWriter):
    """Stores the first tensor twice."""

    def plan(self, structure: Structure, rank: int) -> FormatPlan:
        plan = super().plan(structure, rank)
        return Changed(plan, replace(plan.layout, items=[*plan.layout.items, *plan.layout.items[:1]]))


class Unchecked(DcpWriter):
    """Has checksums of nothing."""

    def plan(self, structure: Structure, rank: int) -> FormatPlan:
        plan = super().plan(structure, rank)

        def encode(objects: Sequence[Any]) -> EncodedSave:
            encoded = plan.encode_objects(objects)
            extents = [[replace(extent, places=places_of(())) for extent in group] for group in encoded.table.extents]
            return replace(encoded, table=replace(encoded.table, extents=extents))

        return Changed(plan, encode=encode)


class Clashing(DcpWriter):
    """Has an index with the name of the manifest."""

    def index(self, rank_indexes: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        return {"manifest.json": b"{}"}


BROKEN: list[tuple[type[Writer], str, str]] = [
    (Shifted, "a_checkpoint_is_the_state", "storage_offset"),
    (Unordered, "it_may_be_written_from_the_tensors_themselves", "negative count"),
    (OnePlan, "other_structures_follow", "weight has other bytes"),
    (Nameless, "a_value_is_stored_or_refused_by_its_key", "layer.value"),
    (FirstObjects, "objects_are_those_of_their_moment", "state.step is 1"),
    (Overlapping, "every_byte_of_the_files_has_one_place", "overlaps"),
    (Gapped, "every_byte_of_the_files_has_one_place", "Differing items"),
    (Capricious, "the_structure_alone_decides_the_layout", "ImageFile"),
    (Rankless, "ranks_have_files_with_names_of_their_own", "len"),
    (Alone, "workers_share_the_bytes", "workers"),
    (Untied, "memory_that_tensors_share_is_stored_once", "payload_bytes"),
    (Unchecked, "a_damaged_byte_is_found", "is damaged"),
    (Clashing, "the_index_takes_no_name_of_another_file", "manifest.json"),
]
_numbers = itertools.count()


@pytest.mark.parametrize(("broken", "promise", "text"), BROKEN)
def test_a_broken_writer_is_found(broken: type[Writer], promise: str, text: str, tmp_path: Path) -> None:
    with pytest.raises((Exception, pytest.fail.Exception), match=text):
        getattr(WriterContract(), f"test_{promise}")(broken(), tmp_path)


def test_each_promise_of_a_writer_can_be_broken() -> None:
    promises = {name.removeprefix("test_") for name in vars(WriterContract) if name.startswith("test_")}
    assert promises == {promise for _, promise, _ in BROKEN}
