"""The index of docs/design.md, and its two ways: each step and each answer is a name that the file defines."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpt_component

PACKAGE = Path(ckpt_component.__file__).parent
PAGE = PACKAGE.parent / "docs" / "design.md"
#: A row whose last cells are a file and a name in it.
_ROW = re.compile(r"^\|(.*)\| `([\w/]+\.py)` \| `([\w.]+)` \|$", re.M)


def section(title: str) -> str:
    return PAGE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(title: str) -> list[tuple[str, str, str]]:
    """What the first cells of a row say, the file, and the name; every row of the section's table has them."""
    found = [(text.strip(), file, name) for text, file, name in _ROW.findall(section(title))]
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    assert len(found) == len(lines) - 2, [line for line in lines[2:] if not _ROW.match(line)]
    return found


def defined(nodes: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """The functions, classes, methods and constants of a module."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name
        elif isinstance(node, ast.ClassDef):
            yield prefix + node.name
            yield from defined(node.body, f"{node.name}.")
        elif isinstance(node, ast.Assign):
            yield from (prefix + target.id for target in node.targets if isinstance(target, ast.Name))


@pytest.mark.parametrize("title", ["The way of a save", "The way of a load", "Where is it?"])
def test_each_row_names_what_its_file_defines(title: str) -> None:
    wrong = []
    for text, file, name in rows(title):
        path = PACKAGE / file
        if not path.exists() or name not in {*defined(ast.parse(path.read_text()).body)}:
            wrong.append(f"{text}: {file}, {name}")
    assert not wrong, "\n".join(wrong)


def test_a_newcomer_has_answers_to_25_questions() -> None:
    questions = [text for text, _, _ in rows("Where is it?")]
    assert len({*questions}) == len(questions) >= 25
    assert [text for text in questions if not text.endswith("?")] == []
