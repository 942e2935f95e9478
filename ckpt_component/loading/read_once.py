"""`ReadOnce`: in a load that all ranks make, each byte that several of them want is read by one, and passed on.

It begins where files are read in many ranges at once (`FileSet.read_all`), whatever these ranges become: tensors, parts
of tensors in any sharding, objects. All ranks meet there, tell each other over the process group which ranges they
want, make the same plan, and read by it. They meet until all have read what they want, however often each one reads.

Checksums of the checkpoint are compared by every rank, for all that it takes. So they find what was damaged in storage,
in the memory of the rank that read it, or on its way; the rank then reads these bytes from storage. Bytes without such
checksums are sent with one, as nothing else would tell that they were damaged on their way.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ..core.coordination import Coordinator
from ..core.formats.index import Index
from ..core.options import ResolvedTimeouts
from ..core.storage.checksum import Checksum, fastest
from ..core.storage.file_set import FileSet
from ..core.storage.safe_open import read_failure
from ..core.storage.space import amount
from ..errors import CheckpointError
from .collective import CollectiveLoad, CollectiveLoads, OpenFiles
from .gloo_group import GlooGroup
from .passed_files import PassedFiles
from .passing import Passing
from .read_plan import Batch, Wanted, plan_reads

logger = logging.getLogger("ckpt_component.readers")

#: Whether a rank has a group to pass bytes over, can make one with the others, or cannot. Then what the ranks do next:
#: pass bytes on over their group or a new one, read by themselves, or end, as all have read.
_READY, _NEW, _ALONE, _END = "ready", "new", "alone", "end"
#: For each rank more, so many seconds more to make a group, in which all connect to all.
_SECONDS_PER_RANK = 0.1


class ReadOnce(CollectiveLoads):
    """Makes loads whose ranks read together, and keeps the process group that they pass bytes over.

    Args:
        ranks: the ranks, which make their loads in the same order
        timeouts: `stall`: a rank that sends nothing for so long is lost; others as for `CollectiveLoad`
    """

    def __init__(self, ranks: Coordinator, timeouts: ResolvedTimeouts) -> None:
        super().__init__(ranks, timeouts)
        self._reads_alone = False
        self._group: GlooGroup | None = None
        self._has_failed = False

    def load(self, about: str, tag: str | None = None, name: str = "load") -> CollectiveLoad:
        """As for `CollectiveLoads`."""
        if self._reads_alone:
            return super().load(about, tag, name)
        return _LoadOnce(self, self._ranks, self._timeouts, about, tag, name)

    def meet(self, tag: str, has_read: bool, is_broken: bool) -> str:
        """Meet the other ranks; returns what all do next, and makes their group if they need one.

        Args:
            tag: names the question
            has_read: whether this rank has read what it wants
            is_broken: whether this rank's group is to be given up

        Raises:
            RanksError, CheckpointTimeoutError: a rank is dead, or does not come
        """
        now, timeouts, dist = self._ranks.outside.now(), self._timeouts, self._ranks.outside.distributed()
        has_world = dist is not None and dist.get_world_size() == self._ranks.world_size
        state = _ALONE if self._has_failed or not has_world else _NEW if self._group is None or is_broken else _READY
        try:
            value = [self._ranks.outside.host_name(), state, has_read]
            step: str = self._ranks.decide(tag, value, _next_step, now + timeouts.stage + timeouts.write)
        except CheckpointError:
            self.close()
            raise
        if step == _NEW or is_broken:
            self.close()
        if step == _NEW:
            self._make_group(dist)
        self._reads_alone |= step == _ALONE
        return step

    def close(self) -> None:
        """Give the group up, and end all that still waits for something in it. Safe to call twice."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _make_group(self, dist: Any) -> None:
        # All ranks have just met. torch.distributed does not know of our heartbeats: it would wait for a dead rank.
        size, timeouts = self._ranks.world_size, self._timeouts
        seconds = min(timeouts.heartbeat + _SECONDS_PER_RANK * size, timeouts.stage)
        try:
            self._group = GlooGroup(dist, self._ranks.rank, size, seconds)
        except (RuntimeError, ValueError) as error:
            self._has_failed = True
            text = "rank %d reads all by itself: no gloo group could be made (%s); see GLOO_SOCKET_IFNAME"
            logger.warning(text, self._ranks.rank, error)

    def passing(self, plan: Sequence[Batch], open_files: Callable[[], FileSet], checksum: Checksum | None) -> Passing:
        """What passes the batches of a plan on over the group; arguments as for `Passing`."""
        waits, lasts = self._timeouts.stall, self._timeouts.stage + self._timeouts.write
        assert self._group is not None, "who cannot tell the others what it wants shares nothing with them"
        return Passing(
            plan,
            self._ranks.rank,
            self._group,
            open_files,
            checksum,
            waits=waits,
            lasts=lasts,
            outside=self._ranks.outside,
        )

    def exchange(self, value: Any) -> list[Any]:
        """The values of all ranks; this rank's alone if they cannot be exchanged, with a warning."""
        group = self._group
        try:
            if group is not None:
                return group.gather(value)
        except (RuntimeError, ValueError) as error:
            logger.warning("rank %d reads all by itself: what others want cannot be told (%s)", self._ranks.rank, error)
            self.close()
        return [value if rank == self._ranks.rank else None for rank in range(self._ranks.world_size)]


def _next_step(values: Sequence[Any]) -> str:
    """On the leading rank: what all ranks do next, given the host, the state and `has_read` of each."""
    hosts, states, have_read = zip(*values, strict=True)
    if _ALONE in states or len({*hosts}) == 1:
        return _ALONE
    if all(have_read):
        return _END
    return _NEW if _NEW in states else _READY


class _LoadOnce(CollectiveLoad):
    """A load whose ranks read together.

    Args:
        once: meets the others; further arguments as for `CollectiveLoad`
    """

    def __init__(
        self, once: ReadOnce, ranks: Coordinator, timeouts: ResolvedTimeouts, about: str, tag: str | None, name: str
    ) -> None:
        super().__init__(ranks, timeouts, about, tag, name)
        self._once = once
        self._passing: Passing | None = None
        self._meetings = 0
        self._step = ""

    def opens(self, open_files: OpenFiles, index: Index, verified: bool) -> OpenFiles:
        """Files whose reads all ranks of this load plan together."""
        checksum = None if verified and index.manifest is not None else fastest()
        return partial(self._opened, open_files, index, checksum)

    def _opened(self, open_files: OpenFiles, index: Index, checksum: Checksum | None, folder: str) -> FileSet:
        plans = partial(self._plan, partial(open_files, folder), index, checksum)
        return PassedFiles(folder, open_files(folder), self._ranks.rank, plans)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """As for `CollectiveLoad`; this rank has read when its part of such a phase is done, or has failed."""
        with super().phase(name):
            try:
                yield
            except Exception:
                self._wait_for_readers(name)
                raise
            self._wait_for_readers(name)

    def _wait_for_readers(self, phase: str) -> None:
        """Take part in what others still read together."""
        while phase in ("compare", "read") and self._meet(has_read=True) not in (_ALONE, _END):
            self._once.exchange(("", {}))

    def _meet(self, has_read: bool) -> str:
        """What all ranks do next; when they meet, each has what was passed on since they met last."""
        if self._step == _ALONE:
            return _ALONE
        self._meetings += 1
        before, self._passing = self._passing, None
        is_broken = before is not None and before.is_broken
        try:
            self._step = self._once.meet(f"{self._tag}/together/{self._meetings}", has_read, is_broken)
        except CheckpointError:
            self._step = _ALONE  # a meeting fails on all ranks, so none comes to a further one
            raise
        if before is not None:
            before.end(self._timeouts.close)
            if before.is_broken and not is_broken:
                self._once.close()
        return self._step

    def _plan(
        self, open_files: Callable[[], FileSet], index: Index, checksum: Checksum | None, wanted: Wanted
    ) -> tuple[Sequence[Batch], Passing] | None:
        """The plan of all ranks that now read the same checkpoint; None: it has nothing that this one shares."""
        if self._meet(has_read=False) == _ALONE:
            return None
        rank, identity, wants = self._ranks.rank, _identity(index), dict[int, Wanted]()
        for other, value in enumerate(self._once.exchange((identity, dict(wanted)))):
            if value is not None and value[0] == identity:
                wants[other] = value[1]
        plan = plan_reads(wants)
        if self._ranks.is_leader and plan:
            shared, all_bytes = (sum(batch.nbytes for batch in plan if len(batch.ranks) > n) for n in (1, 0))
            text = "%d ranks read %s together; %s of it are wanted by several, and read by one"
            logger.info(text, len(wants), amount(all_bytes), amount(shared))
        takes_part = ({*batch.ranks, batch.reader} for batch in plan)
        if not any(rank in ranks and len(ranks) > 1 for ranks in takes_part):
            return None
        self._passing = self._once.passing(plan, open_files, checksum)
        return plan, self._passing


def _identity(index: Index) -> str:
    """Equal on ranks that read the same checkpoint, and only there: hosts may have other files under the same path."""
    if index.manifest is not None:
        about: Any = index.manifest  # which names the attempt of the save
    else:
        paths = {name: os.path.join(index.folder, name) for name in index.files}
        try:
            about = {path: (index.files[name], index.storage.modified(path)) for name, path in paths.items()}
        except OSError as error:
            raise read_failure(index.path, error) from error
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
