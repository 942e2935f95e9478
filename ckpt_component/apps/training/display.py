"""What a run shows while it runs: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class Display(Protocol):
    """Shows steps."""

    def advance(self) -> None:
        """A step is done."""
        ...

    def show(self, step: int, loss: float, lr: float, norm: float) -> None:
        """The figures of a step; `loss` is the mean since they were shown last."""
        ...


class Lines:
    """One line per report.

    Args:
        steps: the last step.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._done = 0
        self._since = time.perf_counter()

    def advance(self) -> None:
        """See `Display.advance`."""
        self._done += 1

    def show(self, step: int, loss: float, lr: float, norm: float) -> None:
        """See `Display.show`."""
        now = time.perf_counter()
        pace = (now - self._since) / max(self._done, 1) * 1e3
        self._since, self._done = now, 0
        width = len(str(self._steps))
        logger.info(
            "step %*d/%d  loss %.4f  lr %.2e  grad norm %.2f  %.0f ms/step",
            width,
            step,
            self._steps,
            loss,
            lr,
            norm,
            pace,
        )


class Bar:
    """A tqdm bar on stderr.

    Args:
        bar: a tqdm object; owned by the caller.
    """

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def advance(self) -> None:
        """See `Display.advance`."""
        self._bar.update()

    def show(self, step: int, loss: float, lr: float, norm: float) -> None:
        """See `Display.show`."""
        self._bar.set_postfix_str(f"loss {loss:.4f}, lr {lr:.2e}, grad norm {norm:.2f}")


@contextlib.contextmanager
def open_display(start: int, steps: int, plain: bool = False) -> Iterator[Display]:
    """The bar when stderr is a terminal and tqdm is installed (extra `progress`), else lines.

    Args:
        start: steps done already.
        steps: the last step.
        plain: lines in any case, such as for a rank whose lines go to its log file alone.
    """
    if plain or not sys.stderr.isatty():
        yield Lines(steps)
        return
    try:
        from tqdm import tqdm
        from tqdm.contrib.logging import logging_redirect_tqdm
    except ImportError:
        logger.info("no progress bar: tqdm is not installed (pip install 'ckpt_component[progress]')")
        yield Lines(steps)
        return
    # Log lines go above the bar instead of through it.
    with logging_redirect_tqdm(), tqdm(total=steps, initial=start, desc="training", unit="step") as bar:
        yield Bar(bar)
