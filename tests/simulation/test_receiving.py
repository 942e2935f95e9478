"""Whatever happens to a receiver, at every operation: its folder has one version, whole, and later the newest one."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
from evidence import Record
from simulation.publishing import KINDS, Publishing
from simulation.receiving import Serving
from simulation.test_publishing import FAULTS, STATES
from simulation.trained import Trained
from strides import first_of, in_turn

from ckpt_component.errors import CheckpointError
from ckpt_component.testing import Fault, PowerCut
from ckpt_component.testing.machine import Machine

pytestmark = pytest.mark.usefixtures("quiet")


@dataclass(frozen=True)
class Scene:
    """What a receiver does while something happens to it.

    Attributes:
        name: its name
        had: the number of the version that its folder has before; 0: none
        newest: of the source, one after the other, while it follows
        is_read: whether readers open each version, and close it two versions later
    """

    name: str
    had: int
    newest: Sequence[int]
    is_read: bool = False

    def __str__(self) -> str:
        return self.name

    def events(self, serving: Serving, source: Source) -> Iterator[Callable[[], object]]:
        """What happens at the pauses of the receiver."""
        for number in self.newest[1:]:
            if self.is_read:
                yield serving.open_all
            yield partial(source.show, number)
            if self.is_read:
                yield serving.close_all


SCENES = [
    Scene("first", 0, [1]),
    Scene("first_with_deltas", 0, [3]),
    Scene("next", 1, [2]),
    Scene("next_two", 1, [3]),
    Scene("in_the_spare", 0, [1, 2, 3, 4]),
    Scene("in_the_spare_skips", 0, [1, 2, 4, 7]),
    Scene("while_it_is_read", 0, [1, 2, 3, 4], is_read=True),
    Scene("whole_again", 2, [5, 6]),
    Scene("far_behind", 1, [9]),
]


class Source:
    """Versions that were published once, of which receivers are shown the first ones."""

    def __init__(self, trained: Trained, kind: str) -> None:
        run = Publishing.begin(trained, kind)
        self._shown = {0: run.again()}
        for number, checkpoint in enumerate((0, 1, 2, 4, 0, 5, 6, 6, 3), 1):
            run.publish(checkpoint)
            assert not [*run.violations()]
            self._shown[number] = run.again()
        self.publishing = self._shown[0].again()

    def show(self, newest: int) -> None:
        """Let the versions up to a number be there, as they were when that was published."""
        then = self._shown[newest]
        vars(self.publishing.target).update(vars(then.target))
        self.publishing.shown, self.publishing.told = then.shown, then.told


class Scenes:
    """A scene, and each run of it with what happens to its receiver.

    Attributes:
        operations: of the scene, and its end
    """

    def __init__(self, scene: Scene, source: Source) -> None:
        self._scene, self._source = scene, source
        self._before = Serving(source.publishing)
        if scene.had:
            source.show(scene.had)
            self._before.pull()
        machine = self._before.machine()
        serving = self._play(machine, self._before.again())
        self.operations = [*machine.operations, ("end", "")]
        wrong = [*serving.catches_up()]
        assert not wrong and serving.number == scene.newest[-1], wrong

    def _play(self, machine: Machine, serving: Serving) -> Serving:
        machine.done = serving.look
        self._source.show(self._scene.newest[0])
        with contextlib.suppress(PowerCut, CheckpointError, OSError):  # it ends or goes on: the folder is whole
            serving.follow([*self._scene.events(serving, self._source)], machine)
        return serving

    def wrong(self, number: int, fault: Fault, seeds: Sequence[int | None] = (None,)) -> Iterator[str]:
        """What is wrong after a fault at an operation; arguments as of `Trials.wrong`."""
        serving = self._play(Machine({number: fault}), self._before.again())
        name, path = self.operations[number - 1]
        told = f"{fault.kind} at operation {number} ({name} {path})"
        yield from (f"{told}: {text}" for text in serving.wrong)
        for seed in seeds:
            after = serving.again()
            if seed is not None:
                after.disk.cut_power(seed)
                after.number = 0  # which version it is then is free
                after.look()
            yield from (f"{told}, seed {seed}: {text}" for text in after.catches_up())


@pytest.fixture(scope="module")
def sources(trained: Trained) -> Callable[[str], Source]:
    made: dict[str, Source] = {}
    return lambda kind: made.setdefault(kind, made.get(kind) or Source(trained, kind))


CASES = [*itertools.product(SCENES, KINDS, FAULTS, [1])]
#: In every run: one of these, of whose operations each n-th has its turn.
QUICK = [(*case[:3], 8) for case in CASES if case[0].name == "next" and case[2] in ("kill", "power")]


def cases() -> list[object]:
    return [*in_turn(QUICK, len(QUICK)), *in_turn(CASES, 69, [pytest.mark.slow])]


@pytest.mark.parametrize(("scene", "kind", "fault", "stride"), cases(), ids=str)
def test_something_happens_to_a_receiver_at_every_operation(
    sources: Callable[[str], Source], scene: Scene, kind: str, fault: str, stride: int, record_property: Record
) -> None:
    scenes, wrong = Scenes(scene, sources(kind)), list[str]()
    for number in range(first_of(stride), len(scenes.operations) + 1, stride):
        seeds = range(number, number + STATES) if fault == "power" else [None]
        wrong += scenes.wrong(number, FAULTS[fault], seeds)
    record_property("receivers disturbed", len(scenes.operations) // stride)
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong[:20])
