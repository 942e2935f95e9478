"""Who reads what, and who gets it passed on: each byte is read once, by ranks that read about equally much."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import pytest

from ckpt_component.hosts.batches import Batch
from ckpt_component.hosts.share import LEAST_BYTES, MOST_BYTES, plan_reads

Ranges = Sequence[tuple[int, int]]
Wants = Mapping[int, Mapping[str, Ranges]]


def bytes_of(ranges: Ranges) -> int:
    return sum(end - start for start, end in ranges)


def union(wants: Wants) -> dict[str, list[tuple[int, int]]]:
    """What any rank wants, as ranges without overlaps."""
    found: dict[str, list[tuple[int, int]]] = {}
    for name in {name for wanted in wants.values() for name in wanted}:
        merged: list[tuple[int, int]] = []
        for start, end in sorted(each for wanted in wants.values() for each in wanted.get(name, ())):
            if merged and start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((start, end))
        found[name] = merged
    return found


def joined(ranges: Ranges) -> list[tuple[int, int]]:
    """Ranges in order, those that touch as one; they must not overlap."""
    found: list[tuple[int, int]] = []
    for start, end in ranges:
        assert not found or start >= found[-1][1], "read twice, or out of order"
        if found and start == found[-1][1]:
            found[-1] = found[-1][0], end
        else:
            found.append((start, end))
    return found


def loads(plan: Sequence[Batch], ranks: int) -> list[int]:
    counts = Counter[int]()
    for batch in plan:
        counts[batch.reader] += batch.nbytes
    return [counts[rank] for rank in range(ranks)]


def check(wants: Wants) -> None:
    plan, wanted = plan_reads(wants), union(wants)
    for name, ranges in wanted.items():
        read = [(start, end) for batch in plan if batch.file == name for start, end, _ in batch.stretches]
        assert joined(read) == [each for each in ranges if each[0] < each[1]], "each byte is read exactly once"
    for rank, own in wants.items():  # each rank gets what it wants, and what it reads
        for name, mine in own.items():
            got = [(start, end) for batch in plan if batch.file == name for start, end, *_ in batch.part_of(rank)]
            for start, end in mine:
                inside = [(max(a, start), min(b, end)) for a, b in got if a < end and start < b]
                assert joined(inside) == [(start, end)]
    total, alone = sum(map(bytes_of, wanted.values())), Counter[int]()
    for batch in plan:
        assert batch.nbytes <= MOST_BYTES < 6 << 20
        if len(batch.ranks) == 1:
            assert batch.reader == batch.ranks[0], "what one rank wants it reads itself"
            alone[batch.reader] += batch.nbytes
    even = -(-total // len(wants))
    cell = max(LEAST_BYTES, even // 20)
    assert all(load <= max(alone[rank], even + cell) for rank, load in enumerate(loads(plan, len(wants))))


def worlds() -> Iterator[Wants]:
    """Any overlaps: each rank wants each of some ranges, or not; and ranges at random, of any sizes."""
    ranges = [(0, 300 << 10), (300 << 10, 301 << 10), (512 << 10, 3 << 20)]
    chosen = list(itertools.product((False, True), repeat=len(ranges)))
    for worlds_of_two in itertools.product(chosen, repeat=2):
        yield {
            rank: {"a": [each for each, is_in in zip(ranges, which, strict=True) if is_in]}
            for rank, which in enumerate(worlds_of_two)
        }
    for which in itertools.combinations_with_replacement(chosen, 3):
        yield {rank: {"a": [each for each, w in zip(ranges, which[rank], strict=True) if w]} for rank in range(3)}
    random.seed(55)
    for _ in range(60):
        wants: dict[int, dict[str, list[tuple[int, int]]]] = {}
        for rank in range(random.randint(1, 9)):
            wants[rank] = {}
            for name in random.sample("abc", random.randint(0, 3)):
                places = sorted(random.sample(range(random.choice([40, 10**6, 10**8])), 2 * random.randint(1, 6)))
                wants[rank][name] = list(zip(places[::2], places[1::2], strict=True))
        yield wants


def test_each_byte_is_read_once_and_reaches_all_who_want_it_whatever_they_want() -> None:
    for wants in worlds():
        check(wants)


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_ranks_that_want_the_same_read_equally_much_also_if_one_item_is_half_of_it(ranks: int) -> None:
    whole, items = (
        1 << 30,
        [(0, 512 << 20), *((start, start + (8 << 20)) for start in range(512 << 20, 1 << 30, 8 << 20))],
    )
    plan = plan_reads({rank: {"data": items} for rank in range(ranks)})
    assert sum(loads(plan, ranks)) == whole
    assert max(loads(plan, ranks)) <= 1.1 * whole / ranks


def test_who_reads_more_for_itself_reads_less_for_others() -> None:
    own, shared = [(0, 100 << 20)], [(200 << 20, 400 << 20)]
    plan = plan_reads({0: {"data": [*own, *shared]}, 1: {"data": shared}, 2: {"data": shared}})
    assert max(loads(plan, 3)) <= 1.1 * (300 << 20) / 3


def test_what_two_ranks_want_of_many_is_read_by_all() -> None:
    plan = plan_reads({0: {"data": [(0, 1 << 30)]}, 1: {"data": [(0, 1 << 30)]}, 2: {}, 3: {}})
    assert max(loads(plan, 4)) <= 1.1 * (1 << 30) / 4


def test_ranks_read_at_the_same_time_near_each_other() -> None:
    """So no rank waits long for what it needs next, and needs little memory for what comes too early."""
    plan = plan_reads({rank: {"data": [(0, 80 * MOST_BYTES)]} for rank in range(8)})
    assert all({batch.reader for batch in plan[start : start + 8]} == {*range(8)} for start in range(0, 80, 8))
