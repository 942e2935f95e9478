"""A long history of published versions: a publisher and a receiver live, die and come again, and each version is right."""

from __future__ import annotations

import errno
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from ckpt_component.errors import CheckpointError
from ckpt_component.testing import Fault, PowerCut
from ckpt_component.testing.machine import Machine

from .publishing import MIRROR, OPTIONS, Publishing, lose_mirror
from .receiving import Serving
from .trained import ALIKE, COUNT, Trained

FAULTS = {
    "kill": Fault("cut"),
    "power": Fault("cut"),
    "fails": Fault("fail"),
    "is_full": Fault("fail", errno.ENOSPC),
    "stays_full": Fault("fail", errno.ENOSPC, lasts=True),
    "answer_lost": Fault("lost"),
}
#: Versions that a receiver lives for, at most.
_LIFE = 6


class PublishedHistory:
    """See the top of this file.

    Args:
        trained: the checkpoints
        kind: of the target, see `Publishing`
        seed: of all choices

    Attributes:
        wrong: what must never be, and was
        happened: what happened how often
    """

    def __init__(self, trained: Trained, kind: str, seed: int) -> None:
        self._random = random.Random(f"{kind} {seed}")
        self._trained = trained
        self.publishing = Publishing.begin(trained, kind)
        self.serving = Serving(self.publishing)
        self.wrong: list[str] = []
        self.happened = Counter[str]()
        #: The last things that happened, for the message.
        self.told = deque[str](maxlen=8)
        #: Which operations a publisher and a receiver were last disturbed at, and how many they have: each has its turn.
        self._at = {"publisher": seed, "receiver": seed}
        self._operations = {"publisher": 40, "receiver": 60}
        self._runs = 1

    def run(self, versions: int) -> list[str]:
        """Let so many versions be published; returns what is wrong."""
        while max(self.publishing.told, default=0) < versions and not self.wrong:
            self._receive()
        for checkpoint in range(4) if not self.wrong else ():
            self.publishing.publish(checkpoint)
        self.wrong += [*self.publishing.violations(), *self.serving.catches_up()]
        return [f"{text} ({'; '.join(self.told)})" for text in self.wrong[:3]]

    # The receiver

    def _receive(self) -> None:
        """A receiver lives until it has seen some versions, or something ends it."""
        choice, serving = self._random, self.serving
        kind, faults = self._disturbed("receiver", 0.6)
        machine = serving.machine(faults=faults)
        machine.looked = self._at_look(choice.randrange(1, 400))
        events = self._events(choice.randrange(1, _LIFE))
        try:
            serving.follow(events, machine)
        except PowerCut:
            if kind == "power":
                serving.disk.cut_power(choice.randrange(1 << 30))
                serving.number = 0  # which of the two versions it is then is free
        except (CheckpointError, OSError) as error:
            if not faults:
                self.wrong.append(f"a receiver that nothing happened to: {error!r}")
        self._operations["receiver"] = max(len(machine.operations), 1)
        serving.look()
        self.wrong += serving.wrong
        if choice.random() < 0.1 and self.publishing.told:
            self.wrong += serving.catches_up()

    def _events(self, count: int) -> Iterator[Callable[[], object]]:
        """What happens while a receiver pauses."""
        for _ in range(count):
            if self._random.random() < 0.3:
                yield self.serving.open_all if not self.serving.held and self.serving.number else self.serving.close_all
            yield self._publish
        yield lambda: None  # a last look
        yield self.serving.close_all

    def _at_look(self, number: int) -> Callable[[], None]:
        """Publishes when a receiver looks at something for the n-th time."""
        left = iter(range(number))

        def looked() -> None:
            if next(left, None) == number - 1 and self._random.random() < 0.5:
                self._publish()

        return looked

    # The publisher

    def _publish(self) -> None:
        """Publish a version, if nothing prevents it."""
        choice, publishing = self._random, self.publishing
        if choice.random() < 0.15:
            name = choice.choice([*OTHERS])
            self._note(name)
            OTHERS[name](self)
        kind, faults = self._disturbed("publisher", 0.5)
        machine = Machine(faults)
        checkpoint = choice.randrange(COUNT if choice.random() < 0.2 else ALIKE)
        try:
            publishing.publish(checkpoint, machine)
        except PowerCut:
            if kind == "power":
                publishing.power_goes_off(choice.randrange(1 << 30))
        except (CheckpointError, OSError) as error:
            if not faults:
                self.wrong.append(f"a publisher that nothing happened to: {error!r}")
        self._operations["publisher"] = max(len(machine.operations), 1)
        if choice.random() < 0.3:
            publishing.time_passes()
        self.wrong += publishing.violations()

    def _disturbed(self, who: str, probability: float) -> tuple[str, Mapping[int, Fault]]:
        """What happens to a process, at the next operation that has its turn."""
        if self._random.random() > probability:
            return "", {}
        kind = self._random.choice([*FAULTS])
        self._at[who] = self._at[who] % self._operations[who] + 1
        self._note(f"{who} {kind}", f" at operation {self._at[who]}")
        return kind, {self._at[who]: FAULTS[kind]}

    def _note(self, what: str, where: str = "") -> None:
        self.happened[what] += 1
        self.told.append(f"{what}{where}, after version {max(self.publishing.told, default=0)}")

    def flip_in_mirror(self) -> None:
        """Flip a bit of the mirror."""
        disk = self.publishing.disk
        if disk.find(MIRROR) is not None:
            files = [
                node for path in disk.walk(MIRROR) if (data := getattr(node := disk.find(path), "data", None)) and data
            ]
            if files:
                data = self._random.choice(files).data  # type: ignore[union-attr]
                data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)

    def lose_mirror(self) -> None:
        """Delete the mirror."""
        if self.publishing.disk.find(MIRROR) is not None:
            lose_mirror(self.publishing)

    def another_run(self) -> None:
        """Another run goes on, on another host."""
        self._runs += 1
        self.publishing.run, self.publishing.disk = f"run {self._runs}", self._trained.host()

    def other_options(self) -> None:
        """The publisher gets other options."""
        size = self._random.choice((6_000, 100_000))
        export = replace(OPTIONS.export, max_shard_bytes=size)
        delta = self._random.choice(("auto", "auto", "overwrite", "off"))
        self.publishing.options = replace(OPTIONS, export=export, delta=delta)


#: What else may happen before a version.
OTHERS: Mapping[str, Callable[[PublishedHistory], None]] = {
    "mirror flipped": PublishedHistory.flip_in_mirror,
    "mirror lost": PublishedHistory.lose_mirror,
    "another run": PublishedHistory.another_run,
    "other options": PublishedHistory.other_options,
}
