"""What may happen to a run that keeps its snapshots in memory, at an operation of a phase."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from simulation.keepers import LEASE, HostKeeper
from simulation.recovery import ROOT, Job, Life, newest

from ckpt_component.core.commit.names import MEGATRON
from ckpt_component.core.image.arena import Arena
from ckpt_component.core.storage.memory.keeper_sockets import memory_root
from ckpt_component.core.storage.memory.keepers import LocalPiece
from ckpt_component.core.storage.memory.kept_files import KeptFiles
from ckpt_component.testing.simulation import SimulatedProcess

#: The token of a run that nobody knows of.
OLD = "0badf00d-0badf00d"
#: Longer than any deadline for an answer or a sign of life.
STOPPED_SECONDS = 25.0


@dataclass(frozen=True)
class Trouble:
    """What happens in a phase.

    Attributes:
        kind: a key of `TROUBLES`
        phase: one of `PHASES`
        number: before which operation of the phase, counted from 1 since the trouble before
        rank: whom it hits
    """

    kind: str
    phase: str
    number: int
    rank: int = 0

    @property
    def harms(self) -> bool:
        """Whether it harms a keeper, or what it keeps."""
        return self.kind not in HARMLESS

    def befall(self, life: Life) -> None:
        """Let it happen."""
        TROUBLES[self.kind](life, self.rank)


def kill_trainer(life: Life, rank: int) -> None:
    life.jobs[-1].processes[rank].kill()


def stop_trainer(life: Life, rank: int) -> None:
    stop(life, life.jobs[-1].processes[rank])


def stop(life: Life, process: SimulatedProcess) -> None:
    process.stop(STOPPED_SECONDS)
    life.unwell.append((life.simulation.now, life.simulation.now + STOPPED_SECONDS))


def kill_keeper(life: Life, rank: int) -> None:
    if (keeper := keeper_of(life, rank)) is not None:
        keeper.process.kill()


def stop_keeper(life: Life, rank: int) -> None:
    if (keeper := keeper_of(life, rank)) is not None:
        stop(life, keeper.process)


def flip(life: Life, rank: int) -> None:
    """Flip a bit; nobody can notice it who has compared it with its checksum, or has yet to sum it for the folder."""
    if (image := image_of(life, rank)) is not None:
        at = image.base + life.simulation.random.randrange(image.size)
        byte = os.pread(image.descriptor, 1, at)[0] ^ 1 << life.simulation.random.randrange(8)
        os.pwrite(image.descriptor, bytes([byte]), at)
        is_saved = image.step % 2 or image.step <= newest(life.durable)
        life.flipped = True
        life.late_flips += not is_saved or any(not process.is_dead for process in life.reading)


def truncate(life: Life, rank: int) -> None:
    """No process can do that, not even the one that made the memory."""
    if (image := image_of(life, rank)) is not None:
        try:
            os.ftruncate(image.descriptor, image.base + image.size // 2)
        except PermissionError:
            return
        raise AssertionError("an image can be truncated")


def stale(life: Life, rank: int) -> None:
    """Keepers of an older run show what looks like a newer step."""
    for keeper in keepers_of(life):
        files = {}
        for file in KeptFiles.listed(keeper.files, ""):
            path = file.path.replace(keeper.root, memory_root(ROOT, OLD))
            files[path.replace("iter_000000", "iter_000009")] = KeptFiles.get(keeper.files, file.path, 1 << 20)
        dead = life.simulation.process("an older trainer")
        dead.kill()
        old = life.host.keeper_of(dead, memory_root(ROOT, OLD), keeper.rank, life.ranks).keeper
        for path, data in files.items():
            KeptFiles.put(old.files, path, data)


def lease_over(life: Life, rank: int) -> None:
    for keeper in life.host.living():
        keeper.process.outside.now = partial(_later, keeper.process.outside.now)


def _later(now: Callable[[], float]) -> float:
    return now() + LEASE


def memory_full(life: Life, rank: int) -> None:
    life.host.full_until = life.simulation.now + 10.0


def another_run(life: Life, rank: int) -> None:
    job = Job(life, 10 * len(life.happened) + len(life.jobs), 2)
    job.start()


def another_user(life: Life, rank: int) -> None:
    life.host.belongs_to_another = True


TROUBLES: Mapping[str, Callable[[Life, int], None]] = {
    "kill_trainer": kill_trainer,
    "kill_keeper": kill_keeper,
    "stop_trainer": stop_trainer,
    "stop_keeper": stop_keeper,
    "flip": flip,
    "truncate": truncate,
    "stale": stale,
    "lease_over": lease_over,
    "memory_full": memory_full,
    "another_run": another_run,
    "another_user": another_user,
}
HARMLESS = {"kill_trainer", "stop_trainer", "truncate", "stale", "memory_full"}


class Image(NamedTuple):
    """Where a file with tensors of a step is."""

    step: int
    descriptor: int
    base: int
    size: int


def image_of(life: Life, rank: int) -> Image | None:
    """A file with tensors in the keeper of a rank, in the memory that a trainer has staged into."""
    keeper = keeper_of(life, rank)
    if keeper is None:
        return None
    arenas = [snapshot.arena for snapshot in life.snapshots if snapshot.arena is not None]
    for file in KeptFiles.listed(keeper.files, ""):
        with KeptFiles.opened(keeper.files, os.path.dirname(file.path)) as files:
            piece = files[os.path.basename(file.path)]
            for arena in arenas:
                if isinstance(piece, LocalPiece) and is_same(arena, piece):
                    step = MEGATRON.step(os.path.basename(os.path.dirname(os.path.dirname(file.path))))
                    return Image(step or 0, arena.shared_descriptor(), piece.base, piece.length)
    return None


def keeper_of(life: Life, rank: int) -> HostKeeper | None:
    """The keeper of a rank, or that of another one; None: there is none."""
    found = keepers_of(life)
    return next((each for each in found if each.rank == rank), found[0] if found else None)


def keepers_of(life: Life) -> list[HostKeeper]:
    """The keepers that have a snapshot, those of the newest run; else all."""
    living = life.host.living()
    having = [each for each in living if any("iter_" in file.path for file in KeptFiles.listed(each.files, ""))]
    return [each for each in having if each.root == having[-1].root] or living


def is_same(arena: Arena, piece: LocalPiece) -> bool:
    """Whether a piece is in the memory of an arena."""
    one, other = os.fstat(arena.shared_descriptor()), os.fstat(piece.descriptor)
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
