"""How far a copy has come in each of the ranges that are written side by side, while it still goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: Called with the number of a track, and up to where it is complete now.
Reached = Callable[[int, int], None]


class Tracks:
    """The ranges of memory that are filled together, and which portions of a copy lie in which of them.

    Args:
        bounds: begin and end of each range, ascending.
        portions: begin and end of what each portion of the copy fills. Other portions may lie in between.

    Attributes:
        order: numbers of the portions in the order in which all tracks advance together.
    """

    def __init__(self, bounds: Sequence[tuple[int, int]], portions: Sequence[tuple[int, int]]) -> None:
        self.bounds = bounds
        #: For every portion the tracks that it lies in.
        self.of: list[list[int]] = [[] for _ in portions]
        #: For every track (where in it a portion begins, the portion's number), ascending.
        self.floors: list[list[tuple[int, int]]] = []
        reached = [0] * len(portions)
        for track, (first, last) in enumerate(bounds):
            inside = [number for number, (start, end) in enumerate(portions) if start < last and end > first]
            self.floors.append(sorted((max(portions[number][0], first), number) for number in inside))
            for number in inside:
                self.of[number].append(track)
                reached[number] = max(portions[number][0] - first, 0)
        self.order = sorted(range(len(portions)), key=lambda number: (reached[number], number))


class Marks:
    """Up to where each track is complete, in one copy. Not safe to use from several threads at once.

    Args:
        tracks: of the copy.
        reached: is told of every advance.
    """

    def __init__(self, tracks: Tracks, reached: Reached) -> None:
        self._tracks = tracks
        self._reached = reached
        self._done = bytearray(len(tracks.of))
        #: By track: its first portion that is not done.
        self._next = [0] * len(tracks.bounds)
        for track in range(len(tracks.bounds)):
            self._advance(track)

    def done(self, portion: int) -> None:
        """A portion was copied."""
        self._done[portion] = 1
        for track in self._tracks.of[portion]:
            self._advance(track)

    def _advance(self, track: int) -> None:
        floors, number = self._tracks.floors[track], self._next[track]
        while number < len(floors) and self._done[floors[number][1]]:
            number += 1
        if number == self._next[track] and floors:
            return
        self._next[track] = number
        self._reached(track, floors[number][0] if number < len(floors) else self._tracks.bounds[track][1])
