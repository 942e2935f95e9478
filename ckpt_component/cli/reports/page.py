"""Write a picture and a self-contained HTML page with it. Needs the extra `plot`."""

from __future__ import annotations

import base64
import html
import logging
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...errors import CheckpointConfigError

#: Shown if the extra is not installed.
NO_PICTURE = "no picture: pip install matplotlib"


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def write_report(write: Callable[[Path], Sequence[Path]], out: Path, say: Callable[[str], None]) -> None:
    """Write the files of a report, and say where they are.

    Args:
        write: Writes them into a folder and returns their paths.
        out: The folder, which is created.
        say: Function that prints the text.

    Raises:
        CheckpointConfigError: They cannot be written.
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


def write_page(base: Path, figure: Any, title: str, about: str, caption: str, blocks: Sequence[str]) -> list[Path]:
    """Write the picture, and the page as HTML.

    Args:
        base: Path of the files without `.png` and `.html`.
        figure: The picture, which is embedded in the page.
        title: Title of the page.
        about: Text below the title.
        caption: Caption of the picture.
        blocks: Preformatted texts below the picture.

    Returns:
        Both files.
    """
    png, page = base.with_suffix(".png"), base.with_suffix(".html")
    figure.savefig(png, dpi=110)
    image = base64.b64encode(png.read_bytes()).decode()
    title, about, caption = map(html.escape, (title, about, caption))
    texts = "\n".join(f"<pre>{html.escape(block)}</pre>" for block in blocks)
    page.write_text(
        f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 100rem; padding: 0 1rem; color: #222 }}
img {{ max-width: 100% }} pre {{ overflow-x: auto; background: #f6f6f4; padding: 1rem; font-size: 12px }}
</style></head><body>
<h1>{title}</h1><p>{about}</p>
<p>{caption}</p>
<img alt="{caption}" src="data:image/png;base64,{image}">
{texts}
</body></html>
""",
        encoding="utf-8",
    )
    return [png, page]
