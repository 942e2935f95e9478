"""The screenshots of docs/ckpt.md: `python docs/screenshots.py CHROMIUM` writes docs/pictures/show.svg and report.png.

Both are of one run that this makes: a small GPT whose saves take longer than its steps. `ckpt show` prints to a terminal that rich
draws; the browser draws the page of `ckpt report`. Needs the extras `cli` and `plot`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PICTURES = Path(__file__).resolve().parent / "pictures"
RUN = "runs/small"
#: Steps of some 50 ms beside saves of 58 MB; steps follow the last save.
TRAIN = (
    "+recipe=cpu_quick model=gpt_tiny model.context=16 train.batch_size=1 train.steps=65 train.eval_every=null "
    f"checkpoint.save.at_end=false checkpoint.dir={RUN}"
)
SHOW = ("show", RUN, "--depth", "3")
_WIDTH = 92  # characters of the terminal; the tree has no longer line


class Terminal(io.StringIO):
    """Text that a command prints to a terminal, with colour."""

    def isatty(self) -> bool:
        """So that commands use colour."""
        return True


def printed(arguments: tuple[str, ...]) -> str:
    """What a command prints to a terminal, as if the current folder were a home."""
    from ckpt_component.cli.app import main

    os.environ["COLUMNS"] = str(_WIDTH)
    with contextlib.redirect_stdout(Terminal()) as terminal, contextlib.suppress(SystemExit):
        main(arguments)
    return terminal.getvalue().replace(os.getcwd(), "/home/me")


def drawn(command: str, text: str) -> str:
    """A terminal as an SVG image that loads nothing."""
    from rich._export_format import CONSOLE_SVG_FORMAT
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text))
    without_fonts = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    image = console.export_svg(title=command, code_format=without_fonts, unique_id="show")
    image = image.replace(">", f"><title>What {command} prints</title>", 1)
    return re.sub(r"[ \t]+$", "", image, flags=re.MULTILINE)


def write(chromium: str) -> None:
    """Make the run and write both pictures."""
    with tempfile.TemporaryDirectory() as home, contextlib.chdir(home):
        subprocess.run(["ckpt-train", *TRAIN.split()], check=True, timeout=300)
        (PICTURES / "show.svg").write_text(drawn(f"ckpt {' '.join(SHOW)}", printed(SHOW)))
        subprocess.run(["ckpt", "report", RUN], check=True, timeout=60)
        page, image = Path(home, RUN, "events", "run.html"), PICTURES / "report.png"
        flags = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1150,1120", f"--screenshot={image}"]
        subprocess.run([chromium, *flags, page.as_uri()], check=True, timeout=120)


if __name__ == "__main__":
    write(sys.argv[1])
