"""Which tests to run for a mutant: some of those that reach the changed statement."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

#: Tests are run for a mutant until the quickest took so long without it, and those that tell most of the file too.
QUICK_SECONDS, TELLING_SECONDS = 1.5, 12.0


class Reach:
    """What the tests reach without a mutant.

    Args:
        seconds: by the place of a test among all: how long it takes
        tests: by file and line of a statement: the places of the tests that reach it
        names: of the test functions, by place

    Attributes:
        seconds: as given
        names: as given
    """

    def __init__(
        self, seconds: Mapping[int, float], tests: Mapping[tuple[str, int], Sequence[int]], names: Sequence[str]
    ) -> None:
        self.seconds, self.names, self._tests = seconds, names, tests

    def chosen(self, file: str, line: int | None, more: int, first: str | None = None) -> Sequence[int]:
        """The tests to run for a mutant of a statement, or of what runs when the file is imported.

        First comes a test function that is known to notice it, then the quickest of each, then those that tell most of
        the file: that reach statements which few others reach.
        """
        weights, reaching = defaultdict[int, float](float), set[int]()
        for (each, at), tests in self._tests.items():
            if each == file:
                for test in tests:
                    weights[test] += 1 / len(tests)
                reaching.update(tests if line in (None, at) else ())
        turns, turn_of = Counter[str](), dict[int, int]()
        for test in sorted(reaching, key=self.seconds.__getitem__):
            turn_of[test] = turns[self.names[test]]
            turns[self.names[test]] += 1
        known = [test for test in reaching if self.names[test] == first]
        quickest = sorted(reaching.difference(known), key=lambda test: (turn_of[test], self.seconds[test]))
        quick = [*known, *self._within(more * QUICK_SECONDS, quickest)]
        others = sorted(
            reaching - set(quick), key=lambda test: (turn_of[test] > 2, -weights[test] / (self.seconds[test] + 0.1))
        )
        return [*quick, *self._within(more * TELLING_SECONDS, others)]

    def _within(self, seconds: float, tests: Sequence[int]) -> Iterator[int]:
        for test in tests:
            if seconds > 0:
                yield test
            seconds -= self.seconds[test]
