"""A page that needs nothing but itself: a picture and blocks of text. Pictures need the extra `plot`."""

from __future__ import annotations

import base64
import html
import io
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

#: Shown where the extra is not installed.
NO_PICTURE = "no picture: pip install 'ckpt_component[plot]'"


def can_plot() -> bool:
    """Whether matplotlib is there."""
    return find_spec("matplotlib") is not None


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure; sizes in inches."""
    # It logs every font that it looks for.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    # Not pyplot: it keeps figures and picks a window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # type: ignore[import-not-found,unused-ignore]
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png_of(figure: Any) -> bytes:
    """A figure as the bytes of a PNG file."""
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=110)
    return written.getvalue()


def page(title: str, about: str, caption: str, png: bytes, blocks: Sequence[str]) -> str:
    """The page as HTML.

    Args:
        title: of the page.
        about: what it is of.
        caption: what the picture shows.
        png: the picture, which becomes part of the page.
        blocks: texts of fixed width, below each other.
    """
    image = base64.b64encode(png).decode()
    texts = "\n".join(f"<pre>{html.escape(block)}</pre>" for block in blocks)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 100rem; padding: 0 1rem; color: #222 }}
img {{ max-width: 100% }} pre {{ overflow-x: auto; background: #f6f6f4; padding: 1rem; font-size: 12px }}
</style></head><body>
<h1>{html.escape(title)}</h1><p>{html.escape(about)}</p>
<p>{html.escape(caption)}</p>
<img alt="{html.escape(caption)}" src="data:image/png;base64,{image}">
{texts}
</body></html>
"""
