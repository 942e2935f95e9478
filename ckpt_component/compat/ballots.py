"""What ranks say and decide about a question, as keys of the store that they share."""

from __future__ import annotations

import json
from collections.abc import Callable

from ..coordination.rank_store import RankStore
from .verdict import Verdict, outcome_as_plain

#: Which of some ranks are gone, and what is to say about them; the ranks are looked for only where that is asked.
Lost = Callable[[Callable[[], list[int]]], dict[int, str]]
#: How many agreements made later were joined before; how many made before wait to be joined, and how many in all.
Place = tuple[int, int, int]


class Ballots:
    """The keys of all questions of one agreement. A question's `tag` is the beginning of its keys.

    Args:
        store: with keys for this agreement alone.
        lost: tells which ranks are gone.
        place: of this agreement among those of its rank, which must be the same on all ranks; see `Ranks`.
    """

    def __init__(self, store: RankStore, lost: Lost, place: Place) -> None:
        self._store = store
        self._lost = lost
        self._place = place
        self._in_place = False  # on all ranks, as far as rank 0 has seen

    def tell(self, tag: str, error: BaseException | None) -> None:
        """Say how it went on this rank. Once a question."""
        said = [outcome_as_plain(error), self._place]
        self._store.set(f"{tag}/said/{self._store.rank}", json.dumps(said).encode())
        if error is not None:
            self._store.add(f"{tag}/failed", 1)
        self._store.add(f"{tag}/count", 1)

    def counted(self, tag: str) -> Verdict | None:
        """What follows from what the ranks have said until now; None: nothing yet."""
        all_said = self.all_said(tag)
        failed = self._store.add(f"{tag}/failed", 0)  # after the above: who failed says this first
        if all_said and not failed:
            return Verdict(self._out_of_place(tag))
        lost = {} if failed else self._lost(lambda: self.silent(tag))
        if not failed and not lost:
            return None
        return self.failed(tag, self.silent(tag), lost)

    def failed(self, tag: str, silent: list[int], lost: dict[int, str]) -> Verdict:
        """The verdict with the errors that were said, and what is known of ranks that are lost."""
        present = [number for number in range(self._store.world_size) if number not in silent]
        said = self._store.read([f"{tag}/said/{number}" for number in present])
        told = {number: json.loads(data)[0] for number, data in zip(present, said, strict=True)}
        failures = {number: plain for number, plain in told.items() if plain is not None}
        code = next((plain["errno"] for plain in failures.values() if plain["errno"] is not None), None)
        return Verdict({**{number: plain["text"] for number, plain in failures.items()}, **lost}, code)

    def _out_of_place(self, tag: str) -> dict[int, str]:
        """Which ranks take part with another queue than rank 0, and what is to say about them; looked for once."""
        if self._in_place:
            return {}
        said = self._store.read([f"{tag}/said/{number}" for number in range(self._store.world_size)])
        places = [json.loads(data)[1] for data in said]
        strangers = [number for number, place in enumerate(places) if not _alike(place, places[0])]
        self._in_place = not strangers
        text = "asked about another queue than rank 0: all ranks must ask about their queues in the same order"
        return dict.fromkeys(strangers, text)

    def all_said(self, tag: str) -> bool:
        """Whether every rank has said how it went there."""
        return self._store.add(f"{tag}/count", 0) >= self._store.world_size

    def silent(self, tag: str) -> list[int]:
        """The ranks that have not."""
        ranks = range(self._store.world_size)
        return [number for number in ranks if self._store.peek(f"{tag}/said/{number}") is None]

    def decide(self, tag: str, verdict: Verdict) -> None:
        """On rank 0: write the verdict."""
        self._store.set(f"{tag}/verdict", verdict.encoded())

    def read(self, tag: str) -> Verdict | None:
        """Rank 0's verdict; None: there is none yet."""
        data = self._store.peek(f"{tag}/verdict")
        return None if data is None else Verdict.decoded(data)

    def announce(self, number: int, looks: int) -> None:
        """On rank 0: say up to which question, and look at it, all that there is to tell has been written."""
        self._store.set("announced", f"{number} {looks}".encode())

    def announced(self) -> tuple[int, int]:
        """What rank 0 announced last."""
        number, looks = (self._store.peek("announced") or b"0 0").split()
        return int(number), int(looks)

    def add(self, tag: str, value: int) -> None:
        """Add this rank's part to a sum."""
        self._store.add(f"{tag}/sum", value)
        self._store.add(f"{tag}/count", 1)

    def total(self, tag: str) -> int:
        """The sum, once all have said theirs."""
        return self._store.add(f"{tag}/sum", 0)

    def leave(self, tag: str, verdict: Verdict | None) -> None:
        """Nothing more is asked about it here; the last rank to say so removes its keys."""
        well = verdict is not None and not verdict.failures
        if well:
            self._store.delete([f"{tag}/said/{self._store.rank}"])
        if self._store.add(f"{tag}/left", 1) >= self._store.world_size:
            said = [] if well else [f"said/{number}" for number in range(self._store.world_size)]
            self._store.delete([f"{tag}/{name}" for name in (*said, "count", "failed", "verdict", "sum", "left")])


def _alike(place: list[int], other: list[int]) -> bool:
    """Ranks may have queues of their own that wait, and then nothing is known about those before."""
    return place[0] == other[0] and (place[1] == other[1] or place[2] != other[2])
