"""The pictures of README and docs: of the numbers and the output that they say, in the colours of the page."""

from __future__ import annotations

import html
import re
import runpy
from pathlib import Path
from typing import Any

import ckpt_component

REPOSITORY = Path(ckpt_component.__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"


def script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(DOCS / name))


def test_the_pictures_are_drawn_from_the_measured_numbers() -> None:
    drawn = script("pictures.py")["pictures"]()
    assert {path: path.read_text() for path in drawn} == drawn, "run python docs/pictures.py"


def test_pictures_of_pages_are_there_for_light_and_dark() -> None:
    """A terminal has a background of its own, and so has the page of a report."""
    pages = [REPOSITORY / "README.md", *DOCS.glob("*.md")]
    links = ((page, name) for page in pages for name in re.findall(r'<img src="([^"]+)"', page.read_text()))
    shown = {(page.parent / name).resolve() for page, name in links}
    assert shown == {*(DOCS / "pictures").iterdir()}
    for path in shown - {DOCS / "pictures" / "report.png"}:
        picture = path.read_text()
        assert "<title>" in picture, path.name
        assert "prefers-color-scheme: dark" in picture or "rich-terminal" in picture, path.name


def test_the_terminal_has_the_columns_that_ckpt_show_prints() -> None:
    """Other tests compare the text of the page with what the command prints."""
    cells = re.findall(r"<text class=\"show-r\d+\"[^>]*>(.*?)</text>", (DOCS / "pictures" / "show.svg").read_text())
    lines = {" ".join(html.unescape(cell).split()) for cell in cells}
    text = (DOCS / "ckpt.md").read_text().partition("ckpt show runs")[2].partition("```text\n")[2].partition("```")[0]
    (header,) = [" ".join(line.split()) for line in text.splitlines() if line.startswith("key ")]
    assert header in lines, "run python docs/screenshots.py"


def test_a_page_of_the_site_has_each_drawing_in_light_and_dark(tmp_path: Path) -> None:
    script("site_pages.py")["write"](tmp_path)
    shown = [image for page in tmp_path.rglob("*.md") for image in re.findall(r"pictures/[^\")]+", page.read_text())]
    assert shown.count("pictures/save.light.svg#only-light") == shown.count("pictures/save.dark.svg#only-dark") == 1
    assert "pictures/show.svg" in shown, "a terminal is the same on both"
    for image in shown:
        name, _, only = image.partition("#only-")
        assert ("light" in name, "dark" in name) == (only == "light", only == "dark")
        assert b"prefers-color-scheme" not in (tmp_path / name).read_bytes(), "the page decides"
    light, dark = ((tmp_path / f"pictures/save.{name}.svg").read_text() for name in ("light", "dark"))
    assert "@media not all {" in light and "@media all {" in dark
