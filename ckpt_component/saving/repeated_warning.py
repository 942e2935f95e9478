"""`RepeatedWarning`: of what may happen at each step, the log has the first time, and then how often it was."""

from __future__ import annotations

import logging
import re
from typing import Any

#: Steps, tokens and times, in which two warnings may differ that say the same.
_NUMBERS = re.compile(r"[0-9a-f]{8,}|[0-9]+")


class RepeatedWarning:
    """A warning that is logged once, and then counted, until it says something else. For one thread at a time.

    Args:
        logger: takes the lines
        counted: what the count is of, such as `steps were skipped`

    Attributes:
        row: how many there were since `over`
    """

    def __init__(self, logger: logging.Logger, counted: str) -> None:
        self._logger = logger
        self._counted = counted
        self._logged = set[str]()
        self._total = 0
        self.row = 0

    def warn(self, text: str, *values: Any, defect: BaseException | None = None) -> None:
        """Log a warning, or count it.

        Args:
            text: the line, with `%s` for the values
            *values: these
            defect: an error whose traceback the line has
        """
        self._total += 1
        self.row += 1
        said = _NUMBERS.sub("#", text % values)
        level = logging.DEBUG if said in self._logged else logging.WARNING
        self._logged.add(said)
        self._logger.log(level, f"{text} (logged once, then counted)", *values, exc_info=defect)

    def over(self) -> None:
        """There is no reason for it any more: log how many there were in a row, if there was more than one."""
        if self.row > 1:
            self._logger.info("%d %s in a row", self.row, self._counted)
        self.row = 0

    def end(self) -> None:
        """The run has ended: log how many there were, if there was more than one."""
        if self._total > 1:
            self._logger.warning("in all, %d %s", self._total, self._counted)
        self._total = self.row = 0
