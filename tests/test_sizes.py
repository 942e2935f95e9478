"""The size of the package: fewer, fuller files; one idea each, and what only one other file needs stands with it."""

from __future__ import annotations

import ast
import tokenize
from collections import defaultdict
from pathlib import Path

import ckpt_component

PACKAGE = Path(ckpt_component.__file__).parent

MOST_MODULES = 320
MOST_LINES = 500
#: Lines of code below which a module with one importer joins it.
FEWEST_LINES = 60
#: Module -> why it is one all the same.
SMALL = {
    "background.upload_process": "the program of a process, which outlives the run",
    "testing.simulated_pool": "one of the stand-ins that a simulation is made of, like the store and the disk",
}


def name_of(path: Path) -> str:
    """`core.storage.files` for its path; a package has the name of its folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def code_lines(path: Path) -> int:
    """Lines that are neither blank, comment nor docstring."""
    nothing = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
    with path.open("rb") as file:
        tokens = [each for each in tokenize.tokenize(file.readline) if each.type not in (*nothing, tokenize.ENDMARKER)]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node
        ):
            lines -= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    return len(lines)


def importers() -> dict[str, set[str]]:
    """For each module, those that import it or a name of it."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, path in MODULES.items():
        own = ["ckpt_component", *path.relative_to(PACKAGE).with_suffix("").parts]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                base = ".".join([*(own[: len(own) - node.level] if node.level else []), *filter(None, [node.module])])
                for alias in node.names:
                    whole = f"{base}.{alias.name}".removeprefix("ckpt_component.")
                    found[whole if whole in MODULES else base.removeprefix("ckpt_component.")].add(name)
    return found


def test_the_package_has_few_files_and_none_is_long() -> None:
    assert len(MODULES) <= MOST_MODULES
    lengths = {name: path.read_text().count("\n") for name, path in MODULES.items()}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_a_small_module_has_more_than_one_importer() -> None:
    users = importers()
    small = {
        name
        for name, path in MODULES.items()
        # What a package is made of is said in its `__init__`.
        if path.name != "__init__.py" and len(users[name]) == 1 and code_lines(path) < FEWEST_LINES
    }
    assert small == SMALL.keys()
    assert len(SMALL) <= 15
