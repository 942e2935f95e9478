"""Chunks that make up a tensor, and those that do not: against counting every element."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from ckpt_component import CheckpointCorruptError
from ckpt_component.state.coverage import Region, check_cover, is_shape


def cut_up(whole: tuple[int, ...], rng: random.Random) -> list[Region]:
    """Random regions that make up the whole: halved again and again."""
    regions: list[Region] = [((0,) * len(whole), whole)]
    for _ in range(rng.randrange(12)):
        offsets, sizes = regions.pop(rng.randrange(len(regions)))
        dimension = rng.randrange(len(whole))
        at = rng.randrange(sizes[dimension] + 1)
        for start, count in ((0, at), (at, sizes[dimension] - at)):
            moved = list(offsets), list(sizes)
            moved[0][dimension] += start
            moved[1][dimension] = count
            regions.append((tuple(moved[0]), tuple(moved[1])))
    rng.shuffle(regions)
    return regions


def is_cover(whole: tuple[int, ...], regions: list[Region]) -> bool:
    counts = dict.fromkeys(itertools.product(*map(range, whole)), 0)
    for offsets, sizes in regions:
        if any(start + count > limit for start, count, limit in zip(offsets, sizes, whole, strict=True)):
            return False
        for place in itertools.product(*(range(a, a + n) for a, n in zip(offsets, sizes, strict=True))):
            counts[place] += 1
    return set(counts.values()) <= {1}


def test_chunks_against_counting_every_element() -> None:
    seed = 7
    rng = random.Random(seed)
    outcomes = {True: 0, False: 0}
    for number in range(1500):
        whole = tuple(rng.randrange(1, 7) for _ in range(rng.randrange(1, 4)))
        regions = cut_up(whole, rng)
        if number % 3:  # one thing wrong, perhaps: moved, made larger or smaller, forgotten, doubled
            chosen = rng.randrange(len(regions))
            offsets, sizes = (list(part) for part in regions[chosen])
            dimension = rng.randrange(len(whole))
            change = rng.randrange(5)
            if change == 0:
                offsets[dimension] += 1
            elif change == 1:
                sizes[dimension] += 1
            elif change == 2:
                sizes[dimension] = max(sizes[dimension] - 1, 0)
            regions[chosen] = (tuple(offsets), tuple(sizes))
            if change == 3:
                del regions[chosen]
            elif change == 4:
                regions.append(regions[chosen])
        right = is_cover(whole, regions)
        outcomes[right] += 1
        try:
            check_cover("x", whole, regions)
        except CheckpointCorruptError as error:
            assert not right, f"seed {seed}, case {number}: {error}: {whole} {regions}"
        else:
            assert right, f"seed {seed}, case {number}: {whole} {regions}"
    assert min(outcomes.values()) > 300


def test_scalars_and_nothing() -> None:
    check_cover("x", (), [((), ())])
    check_cover("x", (0, 3), [])
    check_cover("x", (0, 3), [((0, 0), (0, 3)), ((0, 1), (0, 2))])
    for regions in ([], [((), ()), ((), ())]):
        with pytest.raises(CheckpointCorruptError):
            check_cover("x", (), regions)


@pytest.mark.slow
def test_many_chunks_are_no_square_of_work() -> None:
    """A table of 200 x 200 chunks, and 100,000 in a row: each would take minutes if all pairs were compared."""
    begun = time.process_time()
    check_cover("x", (200, 200), [((a, b), (1, 1)) for a in range(200) for b in range(200)])
    check_cover("x", (3, 100_000), [((0, place), (3, 1)) for place in range(100_000)])
    assert time.process_time() - begun < 10


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((), True),
        ((0, 5), True),
        ((1 << 61,), True),
        ((1 << 62,), False),
        ((0, 1 << 40, 1 << 40), False),
        ((1,) * 64, True),
        ((1,) * 65, False),
        ((-1,), False),
        ((True,), False),
        ((1.0,), False),
        (("1",), False),
    ],
)
def test_shapes(shape: tuple[object, ...], fits: bool) -> None:
    assert is_shape(shape) == fits
