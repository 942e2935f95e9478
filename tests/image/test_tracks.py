"""What is said to be complete is complete, in whatever order portions are done."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict

import pytest
import torch

from ckpt_component.image.copy import HostCopy
from ckpt_component.image.copy_progress import Marks, Tracks


def cut(length: int, pieces: int, chance: random.Random) -> list[tuple[int, int]]:
    """Ranges that cover [0, length), ascending."""
    cuts = sorted({0, length, *(chance.randrange(length) for _ in range(pieces))})
    return list(itertools.pairwise(cuts))


@pytest.mark.parametrize("seed", range(40))
def test_below_a_mark_nothing_is_left_to_be_copied(seed: int) -> None:
    chance = random.Random(seed)
    length = 400
    bounds = cut(length, chance.choice([1, 2, 5]), chance)
    # What each byte belongs to: a portion is wherever its number stands, so that portions lie within one another.
    owner = [0] * length
    for number, (start, end) in enumerate(cut(length, 30, chance)):
        for at in range(start, end):
            owner[at] = number % 9 if number % 3 else -1
    places = defaultdict(list)
    for at, number in enumerate(owner):
        places[number].append(at)
    numbers = sorted(set(places) - {-1})  # -1: there before the copy
    portions = [(min(places[number]), max(places[number]) + 1) for number in numbers]
    marks = dict(enumerate(start for start, _ in bounds))
    copied: set[int] = {-1}

    def reached(track: int, mark: int) -> None:
        start, end = bounds[track]
        assert marks[track] <= mark <= end
        marks[track] = mark
        assert all(owner[at] in copied for at in range(start, mark))

    tracks = Tracks(bounds, portions)
    assert sorted(tracks.order) == list(range(len(portions)))
    following = Marks(tracks, reached)
    for number in chance.sample(range(len(portions)), len(portions)):
        copied.add(numbers[number])
        following.done(number)
    assert [marks[track] for track in range(len(bounds))] == [end for _, end in bounds]


def test_all_tracks_advance_together() -> None:
    portions = [(start, start + 10) for start in range(0, 100, 10)]
    order = Tracks([(0, 50), (50, 100)], portions).order
    assert order == [0, 5, 1, 6, 2, 7, 3, 8, 4, 9]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_copy_of_tensors_tells_how_far_it_has_come(threads: int) -> None:
    sources = [torch.full((1 << 20,), number % 250, dtype=torch.uint8) for number in range(40)]
    sources += [torch.full((900,), 7.0).reshape(30, 30).t(), *(torch.full((300,), 3.0) for _ in range(50))]
    total = sum(source.nbytes for source in sources)
    slab = torch.zeros(total, dtype=torch.uint8)
    slots, start = [], 0
    for source in sources:
        slots.append(slab[start : start + source.nbytes].view(source.dtype).view(source.shape))
        start += source.nbytes
    base, middle = slab.data_ptr(), 20 << 20
    expected = torch.cat([source.contiguous().flatten().view(torch.uint8) for source in sources])
    told = []

    def reached(track: int, mark: int) -> None:
        first, last = [(0, middle), (middle, total)][track][0], mark - base
        assert torch.equal(slab[first:last], expected[first:last])
        told.append((track, last))

    copy = HostCopy(slots, sources, [(base, base + middle), (base + middle, base + total)])
    copy.begin(sources, reached=reached).finish(threads)
    assert dict(told) == {0: middle, 1: total}
    assert len(told) > 5
