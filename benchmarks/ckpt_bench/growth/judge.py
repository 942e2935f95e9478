"""Judge whether a cost grows faster than linearly with the number of items, ranks or hosts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..verdicts import Verdict
from .costs import COSTS, SQUARES, Course, Point, is_counted, points

#: The largest exponent of growth: 1 is linear, 2 quadratic. At ten times the size, an exponent of 1.3 doubles the cost
#: per item; larger states miss caches, and other work on the machine adds noise.
_SECONDS_POWER, _COUNTS_POWER = 1.3, 1.1
#: The largest size is compared with the largest that is at least this many times smaller.
_APART = 9.0
#: Lower costs, in seconds or in bytes and calls, are too small to judge.
_LEAST_SECONDS, _LEAST_COUNT = 0.02, 100.0


def judge_growth(courses: Sequence[Course]) -> list[Verdict]:
    """A verdict for every cost: it grows at most linearly up to the largest size."""
    return [_judge(course, cost) for course in courses for cost in COSTS[course.axis]]


def _judge(course: Course, cost: str) -> Verdict:
    # Looks depend on waiting time, so they have the bound of seconds.
    bound = _COUNTS_POWER if is_counted(cost) and not cost.endswith("looks") else _SECONDS_POWER
    bound += cost in SQUARES
    promise = f"{cost}: the power of the number of {course.axis} that it grows with, at most {bound:g}"
    pair = _compared(points(course, cost))
    if pair is None:
        return Verdict(promise, None, None, f"no two sizes that are {_APART:g} times apart were measured")
    small, large = pair
    if small.low < (_LEAST_COUNT if is_counted(cost) else _LEAST_SECONDS):
        return Verdict(promise, None, None, f"too little to tell at {small.size:,} {course.axis}: {small.low:.3g}")
    power = math.log(large.low / small.low) / math.log(large.size / small.size) if large.low > 0 else 0.0
    return Verdict(promise, power, power <= bound, f"from {small.size:,} to {large.size:,}")


def _compared(measured: Sequence[Point]) -> tuple[Point, Point] | None:
    smaller = [point for point in measured if point.size * _APART <= measured[-1].size]
    return (smaller[-1], measured[-1]) if smaller else None
