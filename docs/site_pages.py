"""Write the pages of the site to build/docs, which `mkdocs.yml` names: `python docs/site_pages.py`.

README.md and its neighbours, the examples, the API reference and the reference of `ckpt` become pages next to those of
docs. Links are written for GitHub, so those to pages that lie elsewhere in the site are rewritten.

A drawing has colours for light and dark pages, by `prefers-color-scheme`. In Safari that is the system's choice, not the
reader's choice of a light or dark page; so a page of the site has both drawings, and the theme shows the one that fits.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
#: Files at the top of the repository and the pages that they become; README.md would be taken for the front page.
PAGES = {
    "README.md": "overview.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "LICENSE": "license.md",
}
_LINK = re.compile(r"(?<=\]\()([\w./-]+)(?=[#)])|(?<= src=\")([\w./-]+)(?=\")")
_IMAGE = re.compile(r"<img src=\"[^\"]+\.svg\"[^>]*>|!\[[^\]]*\]\([^)]+\.svg\)")
_DARK = "(prefers-color-scheme: dark)"
#: What follows the language of a fence is for the tests.
_MARK = re.compile(r"^(```\w+) (?:notest|slow|soak).*$", re.MULTILINE)


def code_page(path: Path) -> str:
    """The page of an example, or of a folder of examples: the code."""
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.suffix in (".py", ".yaml"))
        return "\n".join([f"# {path.name}\n", *(code_page(each).replace("# ", "## ", 1) for each in files)])
    return f"# {path.relative_to(REPOSITORY)}\n\n```{path.suffix[1:]}\n{path.read_text()}```\n"


def reference_page() -> str:
    """The docstrings of all public names, in the groups of docs/api.md."""
    from ckpt_component import __all__ as public

    parts = ["# API reference\n\nFrom the docstrings. [Symbols](api.md) has one line for each.\n"]
    left = {name for name in public if not name.startswith("_")}
    for section in re.split(r"^## ", (REPOSITORY / "docs" / "api.md").read_text(), flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        names = [name for name in dict.fromkeys(re.findall(r"`(\w+)", text)) if name in left]
        left -= {*names}
        if names:
            parts += [f"## {title}\n", *(f"::: ckpt_component.{name}\n" for name in names)]
    return "\n".join(parts)


def commands_page() -> str:
    """What `ckpt COMMAND --help` prints, for all commands; the options that all take stand once."""
    from ckpt_component.cli.app import COMMANDS, parser_of

    subparsers = next(
        action for action in parser_of(list(COMMANDS))._actions if isinstance(action, argparse._SubParsersAction)
    )
    of_each = [list(argument_rows(subparsers.choices[name])) for name in COMMANDS]
    shared = [row for row in of_each[0] if all(row in rows for rows in of_each)]
    parts = [
        "# Commands\n\n`ckpt COMMAND --help` prints the same. [The command ckpt](ckpt.md) shows them by task.\n",
        "Every command takes:\n",
        *table(shared),
    ]
    for name, rows in zip(COMMANDS, of_each, strict=True):
        command = subparsers.choices[name]
        command.formatter_class = lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=100)
        usage = re.sub(
            r" \[-h\]| \[-o KEY=VALUE\]| \[--json\]| \[-v\]| \[-q\]", "", " ".join(command.format_usage().split())
        )
        parts += [
            f"\n## `ckpt {name}`\n\n{cell(' '.join((command.description or '').split()))}\n",
            f"```text\n{usage.removeprefix('usage: ')}\n```\n",
            *table([row for row in rows if row not in shared]),
            f"\n```text\n{(command.epilog or '').strip()}\n```",
        ]
    return "\n".join([*parts, ""])


def argument_rows(command: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """The names and the help of each argument of a command."""
    formatter = command._get_formatter()
    for action in command._actions:
        if action.dest != "help":
            value = "" if action.nargs == 0 else formatter._format_args(action, action.dest.upper())
            names = ", ".join(action.option_strings)
            yield f"`{f'{names} {value}'.strip()}`", cell(formatter._expand_help(action) if action.help else "")


def table(rows: list[tuple[str, str]]) -> list[str]:
    if not rows:
        return []
    escaped = [(name.replace("|", "\\|"), meaning) for name, meaning in rows]
    return ["| argument | meaning |", "|---|---|", *(f"| {name} | {meaning} |" for name, meaning in escaped)]


def cell(text: str) -> str:
    """Plain text in Markdown."""
    return re.sub(r"([|*<\[\]_])", r"\\\1", text)


def examples() -> dict[str, Path]:
    """Pages of the examples, and what they show; `ckpt_train` is an app of many modules, and has none."""
    paths = sorted((REPOSITORY / "examples").iterdir())
    shown = [path for path in paths if path.suffix in (".py", ".sh") or path.name == "hydra_app"]
    return {f"examples/{path.stem}.md": path for path in shown}


def page_of(path: str) -> str | None:
    """The page of the site that shows a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    shown = {os.path.relpath(file, REPOSITORY): page for page, file in examples().items()}
    made = {"examples": "examples/index.md", "benchmarks/ckpt_bench/schema.py": "benchmark.md"}
    return {**PAGES, **shown, **made}.get(path)


def for_the_site(path: Path) -> str:
    """A page with its links rewritten, its drawings in both colours, and without the marks of its blocks."""

    def rewritten(match: re.Match[str]) -> str:
        target = os.path.relpath((path.parent / match[0]).resolve(), REPOSITORY)
        return page_of(target) or match[0]

    return _IMAGE.sub(in_both_colours, _LINK.sub(rewritten, _MARK.sub(r"\1", path.read_text())))


def in_both_colours(image: re.Match[str]) -> str:
    """The light and the dark drawing in the place of one that has both; the theme knows `#only-light`."""
    both = ("light", "dark") if Path(re.findall(r"[\w-]+\.svg", image[0])[-1]).stem in drawings() else ()
    return "".join(re.sub(r"\.svg", f".{colour}.svg#only-{colour}", image[0]) for colour in both) or image[0]


def drawings() -> dict[str, str]:
    """The drawings that differ on light and dark pages, by their names."""
    texts = {path.stem: path.read_text() for path in (REPOSITORY / "docs" / "pictures").glob("*.svg")}
    return {name: text for name, text in texts.items() if _DARK in text}


def pages() -> dict[str, str]:
    """All pages of the site by their paths."""
    listed = [f"- [{path.name}]({os.path.basename(page)})" for page, path in examples().items()]
    return {
        **{path.name: for_the_site(path) for path in (REPOSITORY / "docs").glob("*.md")},
        **{page: for_the_site(REPOSITORY / name) for name, page in PAGES.items()},
        **{page: code_page(path) for page, path in examples().items()},
        "examples/index.md": "\n".join(["# Examples", "", *listed, ""]),
        "reference.md": reference_page(),
        "commands.md": commands_page(),
        "benchmark.md": runpy.run_path(str(REPOSITORY / "docs" / "benchmark.py"))["page"](),
    }


def write(folder: Path) -> None:
    """Write the pages, and the pictures next to them."""
    shutil.rmtree(folder, ignore_errors=True)
    for page, content in pages().items():
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / page).write_text(content)
    shutil.copytree(REPOSITORY / "docs" / "pictures", folder / "pictures")
    for name, drawing in drawings().items():
        (folder / "pictures" / f"{name}.light.svg").write_text(drawing.replace(_DARK, "not all"))
        (folder / "pictures" / f"{name}.dark.svg").write_text(drawing.replace(_DARK, "all"))


if __name__ == "__main__":
    write(REPOSITORY / "build" / "docs")
