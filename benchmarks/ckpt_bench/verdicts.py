"""Evaluate promises: the ratio of two figures of one run, and whether it is within a bound.

A missing figure is a string with the reason; a promise about it neither holds nor fails.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from .measure.row_kinds import LIMITS
from .row_figures import limits_of, spread, why_not
from .runs import Case


@dataclass(frozen=True)
class Measured:
    """A number with its name."""

    name: str
    value: float


#: Why there is no figure.
Missing = str


@dataclass(frozen=True)
class Verdict:
    """One promise, judged.

    Attributes:
        promise: text of the promise, with the bound
        measured: the ratio, or None if it could not be measured
        holds: whether it holds; None if it could not be measured, or is only reported
        note: what was compared, or why it was not
    """

    promise: str
    measured: float | None
    holds: bool | None
    note: str

    def line(self) -> str:
        """The verdict as a line for the terminal."""
        words = {True: "pass", False: "FAIL", None: "not measured" if self.measured is None else "reported"}
        ratio = "" if self.measured is None else f"{self.measured:.2f}"
        return f"{words[self.holds]:<13}{ratio:>7}  {self.promise} ({self.note})"


def at_most(promise: str, bound: float, above: Measured | Missing, below: Measured | Missing) -> Verdict:
    """`above` over `below` must not be higher than the bound."""
    verdict = reported(f"{promise}, at most {bound:.3g}", above, below)
    return verdict if verdict.measured is None else replace(verdict, holds=verdict.measured <= bound)


def at_least(promise: str, bound: float, above: Measured | Missing, below: Measured | Missing) -> Verdict:
    """`above` over `below` must not be lower than the bound."""
    verdict = reported(f"{promise}, at least {bound:.3g}", above, below)
    return verdict if verdict.measured is None else replace(verdict, holds=verdict.measured >= bound)


def reported(promise: str, above: Measured | Missing, below: Measured | Missing) -> Verdict:
    """`above` over `below`, without a bound."""
    if isinstance(above, Missing):
        return Verdict(promise, None, None, above)
    if isinstance(below, Missing):
        return Verdict(promise, None, None, below)
    if below.value <= 0:
        return Verdict(promise, None, None, f"{below.name} is {below.value:.3g}, so that there is no ratio to it")
    return Verdict(promise, above.value / below.value, None, f"{above.name} over {below.name}")


def figure_of(case: Case | Missing, row: str, figure: str) -> Measured | Missing:
    """The median of a row's figure."""
    if isinstance(case, Missing):
        return case
    found = spread(case, row, figure)
    if found is not None:
        return Measured(row, found.median)
    reason = why_not(case, row) or (f"has no figure {figure!r}" if row in case.rows else "is not in this run")
    return f"{row} {reason}"


def raw_of(case: Case | Missing, row: str, *names: str) -> Measured | Missing:
    """The raw hardware time measured next to a row: the smallest of these `raw_` figures."""
    found = [(name, figure_of(case, row, name)) for name in names]
    known = [Measured(f"{name} beside {row}", figure.value) for name, figure in found if isinstance(figure, Measured)]
    return min(known, key=_value) if known else found[0][1]


def limit_of(case: Case | Missing, name: str) -> Measured | Missing:
    """A hardware limit, measured as a separate row."""
    if isinstance(case, Missing):
        return case
    found = limits_of(case).get(name)
    return Measured(name, found.median) if found else why_not(case, LIMITS) or f"no limit {name} was measured"


def best_of(case: Case | Missing, rows: Iterable[str], figure: str, whole: bool = False) -> Measured | Missing:
    """The smallest figure of several rows; with `whole`, only of rows without torn snapshots."""
    if isinstance(case, Missing):
        return case
    found = []
    for row in rows:
        values, torn = spread(case, row, figure), spread(case, row, "torn")
        if values is not None and not (whole and (torn is None or torn.high > 0)):
            found.append(Measured(row, values.median))
    if not found:
        return f"no row to compare with was measured, {case.state} on {case.target}"
    return min(found, key=_value)


def _value(figure: Measured) -> float:
    return figure.value
