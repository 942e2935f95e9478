"""Judge whether a cost grows faster than the number of items or ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..verdicts import Verdict
from .figures import COSTS, Course, Point, is_counted, points

#: The power of the size that a cost grows with: 1 is linear, and 2 would be items times items. Over ten times the size,
#: 1.3 is twice as much for each: caches that a larger state no longer fits in, and other work on the machine.
_SECONDS_POWER, _COUNTS_POWER = 1.3, 1.1
#: Two sizes that are so far apart are compared: the largest one, and the largest of those.
_APART = 9.0
#: What costs less, in seconds or in bytes and calls, is too small to judge.
_LEAST_SECONDS, _LEAST_COUNT = 0.02, 100.0


def judge_growth(courses: Sequence[Course]) -> list[Verdict]:
    """A verdict for every cost: up to the largest size, it grows no faster than linearly."""
    return [_judge(course, cost) for course in courses for cost in COSTS[course.axis]]


def _judge(course: Course, cost: str) -> Verdict:
    # Who waits longer looks more often.
    bound = _COUNTS_POWER if is_counted(cost) and not cost.endswith("looks") else _SECONDS_POWER
    promise = f"{cost}: the power of the number of {course.axis} that it grows with, at most {bound:g}"
    pair = _compared(points(course, cost))
    if pair is None:
        return Verdict(promise, None, None, f"no two sizes that are {_APART:g} times apart were measured")
    small, large = pair
    if small.low < (_LEAST_COUNT if is_counted(cost) else _LEAST_SECONDS):
        return Verdict(promise, None, None, f"too little to tell at {small.size:,} {course.axis}: {small.low:.3g}")
    power = math.log(large.low / small.low) / math.log(large.size / small.size) if large.low > 0 else 0.0
    return Verdict(promise, power, power <= bound, f"from {small.size:,} to {large.size:,}")


def _compared(found: Sequence[Point]) -> tuple[Point, Point] | None:
    smaller = [point for point in found if point.size * _APART <= found[-1].size]
    return (smaller[-1], found[-1]) if smaller else None
