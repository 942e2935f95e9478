"""The formulas of `ckpt plan`. Times are in seconds; the command prints `DALY`."""

from __future__ import annotations

import math

#: What the table is too narrow for.
DALY = (
    "With L lost per save, M MTBF, R restart + durable (J. T. Daly, Future Gen. Comp. Syst. 22, 2006):",
    "  T = sqrt(2 L M) (1 + sqrt(L / 2M) / 3 + L / 18M) - L, first term: J. W. Young, CACM 17, 1974",
    "  training = T / (M exp(R / M) (exp((T + L) / M) - 1))",
)

#: Failures per host and second: 6.5 in 1,000 host-days of the largest cluster of arXiv:2410.21680.
_FAILURES = 6.5 / 1000 / 86400


def mtbf_of(hosts: int) -> float:
    """The mean time between failures of a job on so many hosts, at the rate of a published cluster."""
    return 1 / (hosts * _FAILURES)


def best_interval(lost: float, mtbf: float) -> float:
    """The time of training between two saves that wastes the least.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
    Computer Systems 22 (2006), which refines J. W. Young, "A first order approximation to the optimum checkpoint
    interval", CACM 17 (1974): sqrt(2 lost mtbf).

    Args:
        lost: training time that one save costs
        mtbf: mean time between failures
    """
    if lost >= 2 * mtbf:
        return mtbf
    half = lost / (2 * mtbf)
    return math.sqrt(2 * lost * mtbf) * (1 + math.sqrt(half) / 3 + half / 9) - lost


def training_fraction(interval: float, lost: float, mtbf: float, restart: float, durable: float) -> float:
    """The fraction of time that a run with failures spends on training that lasts (Daly 2006, the complete model).

    Args:
        interval: training time between two saves
        lost: training time that one save costs
        mtbf: mean time between failures, which are independent of each other
        restart: time from a failure until training continues
        durable: time from a snapshot until it is durable. A failure within it falls back to the save before, so this
            much more is trained again, as if the restart took longer.
    """
    # Beyond this the run hardly ever gets from one save to the next, and exp() overflows.
    if (interval + lost + restart + durable) / mtbf > 500:
        return 0.0
    cost = mtbf * math.exp((restart + durable) / mtbf) * math.expm1((interval + lost) / mtbf)
    return interval / cost
