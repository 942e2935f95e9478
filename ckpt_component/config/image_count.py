"""How many images of its state a rank has in host memory, for the run, `ckpt plan` and `ckpt doctor`."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.options import RecoveryMode
from .schema import Recovery


@dataclass(frozen=True)
class ImageCount:
    """The most images that a rank has in host memory.

    Attributes:
        staying: those that recovery keeps: the newest; with peers also the last one there, and one that is being sent
        in_flight: those that are being staged or written
        copies: images of ranks on other hosts
    """

    staying: int
    in_flight: int
    copies: int = 0

    @classmethod
    def of(cls, recovery: Recovery, arenas: int, hosts: int) -> ImageCount:
        """Those of a config.

        Args:
            recovery: `checkpoint.recovery`
            arenas: of the stager; 0: it takes no images
            hosts: how many hosts the job has
        """
        if recovery.mode is RecoveryMode.none:
            return cls(0, arenas)
        # A snapshot for memory alone need not wait for one that is still being written.
        in_flight = max(arenas, 1 if recovery.every_steps is None else 2)
        if recovery.mode is RecoveryMode.host or hosts == 1:
            return cls(1, in_flight)
        # Each rank has one that is there and one that is coming, of as many ranks as have copies of its own.
        return cls(3, in_flight, 2 * min(recovery.replicas, hosts - 1))

    @property
    def own(self) -> int:
        """Images of the rank itself."""
        return self.staying + self.in_flight
