"""Templates that are derived from another shape's are, byte for byte, what `torch.save` writes; or it is asked."""

from __future__ import annotations

import logging
import random

import pytest
import torch

from ckpt_component.image import items
from ckpt_component.image.items import ItemTemplates
from ckpt_component.image.patterns import Numbers, Pattern, UnknownArchiveError

Template = tuple[bytes, bytes]

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.bool, torch.uint16]
asked_of_torch = items._make_template


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes that `torch.save` was asked for."""
    shapes: list[torch.Size] = []

    def make(dtype: torch.dtype, shape: torch.Size) -> Template:
        shapes.append(shape)
        return asked_of_torch(dtype, shape)

    monkeypatch.setattr(items, "_make_template", make)
    return shapes


@pytest.mark.parametrize("dtype", DTYPES, ids=repr)
def test_every_shape_has_the_bytes_of_torch_save_and_few_ask_for_them(
    dtype: torch.dtype, asked: list[torch.Size]
) -> None:
    rng = random.Random(str(dtype))
    counts = [*range(300), *(rng.randint(300, 70_000) for _ in range(300)), 255, 256, 65_535, 65_536, 1 << 22]
    shapes = [(count,) for count in counts]
    shapes += [(rng.randint(0, 300), rng.randint(1, 300)) for _ in range(200)]
    shapes += [tuple(rng.randint(1, 3) for _ in range(rng.randint(3, 6))) for _ in range(100)]
    templates = ItemTemplates()
    for shape in map(torch.Size, shapes):
        assert templates.around(dtype, shape) == asked_of_torch(dtype, shape), shape
    asked.clear()
    for shape in map(torch.Size, shapes):
        templates.around(dtype, shape)
    assert not asked
    for count in range(1000, 2000):
        templates.around(dtype, torch.Size((count,)))
    assert len(asked) <= 2 * 64, "twice for each place at which a payload can end"


def test_a_derived_template_loads_with_torch(asked: list[torch.Size]) -> None:
    import io

    templates = ItemTemplates()
    for rows in (64, 128, 192):
        value = torch.randn(rows, 70_000 // rows)
        prefix, suffix = templates.around(value.dtype, torch.Size((rows, 70_000 // rows)))
        loaded = torch.load(io.BytesIO(prefix + value.numpy().tobytes() + suffix), weights_only=True)
        assert torch.equal(loaded, value)


def test_an_archive_that_differs_in_more_than_numbers_is_asked_for_every_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Template] = []

    def differs(dtype: torch.dtype, shape: torch.Size) -> Template:
        prefix, suffix = asked_of_torch(dtype, shape)
        # As a torch would do that puts a date or a checksum into the archive.
        made.append((prefix.replace(b"ZZ", b"%02d" % len(made), 1), suffix))
        return made[-1]

    monkeypatch.setattr(items, "_make_template", differs)
    templates = ItemTemplates()
    with caplog.at_level(logging.WARNING):
        found = [templates.around(torch.float32, torch.Size((16 * number,))) for number in range(20, 26)]
    assert found == made and len(made) == 6
    assert len(caplog.records) == 1 and "asks torch.save for every shape" in caplog.text


def test_an_archive_of_another_kind_is_unknown(caplog: pytest.LogCaptureFixture) -> None:
    numbers = Numbers.of(torch.float32, (400,))
    assert numbers is not None
    prefix, suffix = asked_of_torch(torch.float32, torch.Size((400,)))
    Pattern(prefix, suffix, numbers)
    other = Numbers.of(torch.float32, (401,))
    assert other is not None
    for wrong in (
        (prefix.replace(b"data.pkl", b"data.pkk"), suffix, numbers),
        (prefix.replace(b"M\x90\x01", b"M\x90\x02", 1), suffix, numbers),
        (prefix.replace(b"\x80\x02", b"\xff\xff", 1), suffix, numbers),
        (prefix, suffix[:-1], numbers),
        (prefix, suffix[1:], numbers),
        (prefix, suffix[:30], numbers),
        (prefix + b"x", suffix, numbers),
        (prefix, suffix, other),
    ):
        with pytest.raises(UnknownArchiveError):
            Pattern(*wrong)


def test_empty_and_huge_tensors_have_no_pattern() -> None:
    assert Numbers.of(torch.float32, (0, 5)) is None
    assert Numbers.of(torch.float32, (1 << 29,)) is None
    assert Numbers.of(torch.float32, ()) is not None
