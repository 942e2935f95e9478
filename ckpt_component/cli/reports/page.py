"""Write a picture and a self-contained HTML page with it. Needs the extra `plot`."""

from __future__ import annotations

import base64
import html
import logging
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...errors import CheckpointConfigError, printable
from ..output import Element, Table

#: Shown if the extra is not installed.
NO_PICTURE = "no picture: pip install matplotlib"


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def write_report(write: Callable[[Path], Sequence[Path]], out: Path, say: Callable[[str], None]) -> None:
    """Write the files of a report, and say where they are.

    Args:
        write: writes them into a folder and returns their paths
        out: the folder, which is created
        say: function that prints the text

    Raises:
        CheckpointConfigError: they cannot be written
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        files = write(out)
    except OSError as error:
        raise CheckpointConfigError(
            f"The report cannot be written into {out} ({error.strerror}); type another --out=FOLDER."
        ) from error
    if not can_plot():
        say(NO_PICTURE)
    if files:
        say(f"in {out}: {', '.join(path.name for path in files)}")


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure; sizes in inches."""
    # It logs every font lookup.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    # pyplot would keep figures in memory and choose a GUI backend.
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    return Figure(figsize=(width, height), layout="constrained")


def without_frame(axis: Any) -> None:
    """Use small ticks, and remove the lines at the top and right."""
    axis.tick_params(labelsize=7)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 100rem; padding: 0 1rem; color: #222 }
.wide { overflow-x: auto } img { max-width: 100%; min-width: 44rem }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; margin: 1rem 0 }
th, td { padding: 0.2rem 0.7rem; text-align: right; white-space: nowrap }
th { border-bottom: 2px solid #bbb } td { border-bottom: 1px solid #e4e4e0 }
tr:hover td { background: #f6f6f4 } .left { text-align: left }
pre { overflow-x: auto; background: #f6f6f4; padding: 1rem; font-size: 12px }
"""


def write_page(
    base: Path, draw: Callable[[], Any], title: str, about: str, caption: str, blocks: Iterable[Element]
) -> list[Path]:
    """Write the picture, and the page as HTML, if matplotlib is installed.

    Args:
        base: path of the files without `.png` and `.html`
        draw: draws the picture, a figure, which is embedded in the page
        title: title of the page
        about: text below the title
        caption: caption of the picture
        blocks: lines and tables below the picture; a text of several lines is preformatted

    Returns:
        Both files; none without matplotlib.
    """
    if not can_plot():
        return []
    png, page = base.with_suffix(".png"), base.with_suffix(".html")
    draw().savefig(png, dpi=110)
    image = base64.b64encode(png.read_bytes()).decode()
    title, about, caption = map(_escaped, (title, about, caption))
    page.write_text(
        f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{_STYLE}</style></head><body>
<h1>{title}</h1><p>{about}</p>
<p>{caption}</p>
<div class="wide"><img alt="{caption}" src="data:image/png;base64,{image}"></div>
{"".join(map(_html, blocks))}</body></html>
""",
        encoding="utf-8",
    )
    return [png, page]


def _html(block: Element) -> str:
    if isinstance(block, str):
        tag = "pre" if "\n" in block else "div"
        return f"<{tag}>{_escaped(block) or '&nbsp;'}</{tag}>\n"
    head = _line(block, block.lines[0], "th")
    rows = "".join(f"<tr>{_line(block, cells, 'td')}</tr>\n" for cells in block.lines[1:])
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>\n'


def _line(table: Table, cells: Sequence[str], tag: str) -> str:
    sides = (' class="left"' if table.is_left(column) else "" for column in range(len(cells)))
    return "".join(f"<{tag}{side}>{_escaped(cell)}</{tag}>" for side, cell in zip(sides, cells, strict=True))


def _escaped(text: str) -> str:
    return html.escape("\n".join(map(printable, text.split("\n"))))
