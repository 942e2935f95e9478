"""What a run comes to, for people: its tables and verdicts, as text and as a page with a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_component.cli.reports.page import NO_PICTURE, can_plot, write_page

from .verdicts import Verdict


@dataclass(frozen=True)
class Presentation:
    """The parts of it.

    Attributes:
        title: title of the page
        name: name of the files of the picture and the page
        tables: the tables, as text
        legend: what their columns mean
        verdicts: the promises, judged; empty if none was checked
        caption: caption of the picture
        draw: draws the picture, with matplotlib; None: nothing was measured
    """

    title: str
    name: str
    tables: Sequence[str]
    legend: str
    verdicts: Sequence[Verdict]
    caption: str
    draw: Callable[[], Any] | None

    def show(
        self, about: Mapping[str, Any], folder: Path, say: Callable[[str], None], *, with_tables: bool = True
    ) -> None:
        """Print it, and write the page if matplotlib is installed.

        Args:
            about: the machine and the settings, for the page
            folder: the folder to write to
            say: prints a line of progress
            with_tables: print the tables; False: they have been printed
        """
        if with_tables:
            print("\n".join(self.tables))
        print(f"\n{self.legend}")
        if self.verdicts:
            print(f"\n{self._judged()}")
        self.write_page(about, folder)
        if not can_plot():
            say(NO_PICTURE)
        say(f"figures are in {folder}")
        if self.verdicts:
            passed = sum(verdict.holds is True for verdict in self.verdicts)
            rest = [verdict for verdict in self.verdicts if verdict.holds is None]
            known = any(verdict.measured is not None for verdict in rest)
            print(f"{passed} hold, {self.failed} FAIL, {len(rest)} not measured{' or only reported' if known else ''}")

    @property
    def failed(self) -> int:
        """How many promises do not hold."""
        return sum(verdict.holds is False for verdict in self.verdicts)

    def write_page(self, about: Mapping[str, Any], folder: Path) -> list[Path]:
        """Write the picture and the page, as `reports.page.write_page`; nothing if nothing was measured."""
        if self.draw is None:
            return []
        blocks = [self.legend, *(table.strip() for table in self.tables), *filter(None, [self._judged()])]
        machine = ", ".join(f"{name}: {value}" for name, value in about.items())
        return write_page(folder / self.name, self.draw, self.title, machine, self.caption, blocks)

    def _judged(self) -> str:
        return "\n".join(verdict.line() for verdict in self.verdicts)
