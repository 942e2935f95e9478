"""What `ckpt plan` is asked, and the figures that it answers with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from ...config.config_files import parts_of
from ...config.rules import ImageCount
from ...config.schema import PARTS, Recovery
from ...core.coordination.coordinator import Hosts
from .measured import Rates
from .measured_restores import RestoreRates

#: From a failure until training continues, without a measurement.
RESTART_S = 300.0


@dataclass(frozen=True)
class PartSizes:
    """What the plan needs to know of the parts of a config.

    Attributes:
        stager: its option
        caller: its option
        arenas: images that the stager takes; 0: the writer reads the live tensors
        blocks: bytes into which the writer then gathers them
    """

    stager: str
    caller: str
    arenas: int
    blocks: int

    @classmethod
    def of_preset(cls, preset: str) -> PartSizes:
        """Those of one of our presets, not `off`."""
        names = parts_of(preset)
        writer = PARTS["writer"][names["writer"]]()
        blocks = 2 * writer.workers * writer.block_bytes  # type: ignore[attr-defined]
        arenas = getattr(PARTS["stager"][names["stager"]](), "arenas", 0)
        return cls(names["stager"], names["caller"], arenas, blocks)


@dataclass(frozen=True)
class Scenario:
    """What to plan for. Rates are bytes per second, times seconds.

    Attributes:
        state: bytes of the state of all ranks
        ranks: number of ranks
        ranks_per_host: ranks on each host, at most
        preset: one of our presets, not `off`, or a user's if `parts` are given
        parts: of the config; None: those of the preset
        storage: what the storage takes from all ranks together; None: as measured, or unknown
        tiered: whether saves go to `checkpoint.local.dir` first, a folder of each host
        local: what that takes from a host; None: as measured, or unknown
        upload: the most that a host uploads; None: what the storage takes
        mtbf: mean time between failures of the whole run; None: at a published rate per host
        restart_s: from a failure until training continues
        recovery: which snapshots stay in memory
        memory_every: time between snapshots that go to memory alone; None: only those of saves stay there
        link: what a host sends to another one; None: as measured, or unknown
        step_s: the time of a step; None: as measured, or unknown
        rates: what saves of an earlier run with the preset took; None: assumptions
        restores: what its restores took
        names: the hosts; empty: they have numbers
    """

    state: float
    ranks: int = 1
    ranks_per_host: int = 1
    preset: str = "async_persistent"
    parts: PartSizes | None = None
    storage: float | None = None
    tiered: bool = False
    local: float | None = None
    upload: float | None = None
    mtbf: float | None = None
    restart_s: float = RESTART_S
    recovery: Recovery = field(default_factory=Recovery)
    memory_every: float | None = None
    link: float | None = None
    step_s: float | None = None
    rates: Rates | None = None
    restores: RestoreRates = field(default_factory=RestoreRates)
    names: tuple[str, ...] = ()

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return len(self.names) or math.ceil(self.ranks / self.ranks_per_host)

    @property
    def ranks_here(self) -> int:
        """Number of ranks on the first host."""
        return min(self.ranks_per_host, self.ranks)

    @property
    def rank_bytes(self) -> float:
        """State of a rank."""
        return self.state / self.ranks

    @property
    def host_bytes(self) -> float:
        """State of the ranks on a host."""
        return self.rank_bytes * self.ranks_here

    @cached_property
    def sizes(self) -> PartSizes:
        """What is known of the parts."""
        return self.parts or PartSizes.of_preset(self.preset)

    @cached_property
    def images(self) -> ImageCount:
        """The images that a rank has."""
        return ImageCount.of(self.recovery, self.sizes.arenas, self.hosts)

    @property
    def has_peers(self) -> bool:
        """Whether other hosts have copies."""
        return self.images.copies > 0

    @property
    def step(self) -> float | None:
        """The time of a step; None: unknown."""
        return self.step_s or self.restores.step_s

    def peers(self) -> dict[str, list[str]]:
        """The hosts that have copies for each host, in the order of the ranks."""
        if not self.has_peers:
            return {}
        names = self.names or tuple(f"host{number}" for number in range(self.hosts))
        hosts, given = Hosts(names), self.recovery.peers or {}
        return {name: hosts.peers_of(name, given, self.recovery.replicas) for name in names}


@dataclass(frozen=True)
class Forecast:
    """One predicted figure: its value (None: unknown), unit, and formula or source."""

    name: str
    value: float | None
    unit: str
    why: str
