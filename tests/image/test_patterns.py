"""Pickles that are derived from another shape's are, byte for byte, those of `torch.save`; or it is asked."""

from __future__ import annotations

import io
import logging
import random
from typing import Any

import pytest
import torch

from ckpt_component.errors import CheckpointStageError
from ckpt_component.image import items
from ckpt_component.image.items import ItemTemplates
from ckpt_component.image.patterns import Numbers, Pattern, UnknownPickleError

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.bool, torch.uint16]
#: The pickle stands behind one local header and its name.
START = 30 + len("archive/data.pkl")
asked_of_torch = items._pickled_by_torch


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes that `torch.save` was asked for."""
    shapes: list[torch.Size] = []

    def make(dtype: torch.dtype, shape: torch.Size) -> bytes:
        shapes.append(shape)
        return asked_of_torch(dtype, shape)

    monkeypatch.setattr(items, "_pickled_by_torch", make)
    return shapes


@pytest.mark.parametrize("dtype", DTYPES, ids=repr)
def test_every_shape_has_the_pickle_of_torch_save_and_few_ask_for_it(
    dtype: torch.dtype, asked: list[torch.Size]
) -> None:
    rng = random.Random(str(dtype))
    counts = [*range(300), *(rng.randint(300, 70_000) for _ in range(300)), 255, 256, 65_535, 65_536, 1 << 22]
    shapes = [(count,) for count in counts]
    shapes += [(rng.randint(0, 300), rng.randint(1, 300)) for _ in range(200)]
    shapes += [tuple(rng.randint(1, 3) for _ in range(rng.randint(3, 6))) for _ in range(100)]
    templates = ItemTemplates()
    for shape in map(torch.Size, shapes):
        pickled = asked_of_torch(dtype, shape)
        assert templates.around(dtype, shape)[0][START : START + len(pickled)] == pickled, shape
    asked.clear()
    for shape in map(torch.Size, shapes):
        templates.around(dtype, shape)
    assert not asked
    for count in range(1000, 2000):
        templates.around(dtype, torch.Size((count,)))
    assert len(asked) <= 2 * 2, "twice for each form: the bytes may be written with two bytes or with four"


def test_a_derived_template_loads_with_torch(asked: list[torch.Size]) -> None:
    templates = ItemTemplates()
    for rows in (64, 128, 192):
        value = torch.randn(rows, 70_000 // rows)
        prefix, suffix = templates.around(value.dtype, torch.Size((rows, 70_000 // rows)))
        loaded = torch.load(io.BytesIO(prefix + value.numpy().tobytes() + suffix), weights_only=True)
        assert torch.equal(loaded, value)


def test_a_pickle_that_differs_in_more_than_numbers_is_asked_for_every_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[bytes] = []

    def differs(dtype: torch.dtype, shape: torch.Size) -> bytes:
        # As a torch would do that puts a date or a checksum into the pickle.
        made.append(asked_of_torch(dtype, shape).replace(b"cpu", b"cp%d" % len(made), 1))
        return made[-1]

    monkeypatch.setattr(items, "_pickled_by_torch", differs)
    templates = ItemTemplates()
    with caplog.at_level(logging.WARNING):
        found = [templates.around(torch.float32, torch.Size((16 * number,))) for number in range(20, 26)]
    assert [prefix[START : START + len(made[0])] for prefix, _ in found] == made and len(made) == 6
    assert len(caplog.records) == 1 and "asks torch.save for every shape" in caplog.text


def test_a_pickle_of_another_kind_is_unknown() -> None:
    numbers, other = Numbers.of(torch.float32, (400,)), Numbers.of(torch.float32, (401,))
    assert numbers is not None and other is not None
    pickled = asked_of_torch(torch.float32, torch.Size((400,)))
    Pattern(pickled, numbers)
    for wrong in (
        (pickled.replace(b"M\x90\x01", b"M\x90\x02", 1), numbers),
        (pickled.replace(b"\x80\x02", b"\xff\xff", 1), numbers),
        (pickled[:-1], numbers),
        (pickled[1:], numbers),
        (pickled[:30], numbers),
        (pickled, other),
    ):
        with pytest.raises(UnknownPickleError):
            Pattern(*wrong)


@pytest.mark.parametrize("right, wrong", [(b"data.pkl", b"data.pkk"), (b"\x80\x02", b"\xff\xff")])
def test_a_torch_save_that_does_not_begin_with_the_pickle_is_refused(
    right: bytes, wrong: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(tensor: torch.Tensor, stream: Any) -> None:
        archive = io.BytesIO()
        real(tensor, archive)
        stream.write(archive.getvalue().replace(right, wrong, 1))

    real = torch.save
    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(CheckpointStageError, match="torch.save"):
        asked_of_torch(torch.float32, torch.Size((3,)))


def test_empty_and_huge_tensors_have_no_pattern() -> None:
    assert Numbers.of(torch.float32, (0, 5)) is None
    assert Numbers.of(torch.float32, (1 << 29,)) is None
    assert Numbers.of(torch.float32, ()) is not None
