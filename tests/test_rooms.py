"""A room imports only from rooms that come before it, and the writer process imports no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpt_component

PACKAGE = Path(ckpt_component.__file__).parent

#: First to last. Rooms of one line are on a level and may import each other.
ORDER = (
    {"errors"},
    {"config", "_hydra_searchpath"},  # keys and their types, which parts check themselves against
    {"storage"},
    {"coordination"},
    {"image"},
    {"writers"},
    {"readers"},
    {"process"},
    {"callers"},
    {"stagers"},
    {"checkpointer", "saver", "schedule", "attempt", "reports", "resumption", "manager", "policies"}
    | {
        "blocking_writer",
        "recording",
        "failures",
        "foreign_parts",
        "lookup",
        "paths",
        "pending",
        "retention",
        "rollback",
        "root_check",
        "tries",
        "untold",
    },
    {"factory"},
    {"sweeps"},
    {"training", "train"},
    {"bench"},
    {"tuning"},
    {"tools"},
)
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
#: Belongs to the family of `errors`, and lives in `config` because it imports Hydra.
CONFIG_ERRORS = "config.errors"


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def name_of(path: Path) -> str:
    """`storage.fs` for ckpt_component/storage/fs.py; a room's `__init__` has the room's name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[str]:
    """Full names below the package that a module imports, inside functions and for type checkers too."""
    own = ["ckpt_component", *path.relative_to(PACKAGE).with_suffix("").parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = (
                [*own[: len(own) - node.level], *([node.module] if node.module else [])]
                if node.level
                else [node.module]
            )
            names = [".".join([*map(str, base), alias.name]) for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith("ckpt_component."):
                yield name.removeprefix("ckpt_component.")


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_only_from_rooms_before_it(path: Path) -> None:
    name = name_of(path)
    room = name.partition(".")[0]
    assert room in LEVEL, f"{room} is a new room: say in ORDER where it stands"
    for imported in imports_of(path):
        target = imported.partition(".")[0]
        if target == "__version__" or imported.startswith(CONFIG_ERRORS):
            continue
        if room == "config":
            assert target in ("config", "errors"), f"{name} imports {imported}"
        assert target in LEVEL, f"{name} imports {imported}, which is no room"
        assert LEVEL[target] <= LEVEL[room], f"{name} imports {imported}, which comes later"


def test_the_errors_import_nothing_but_the_standard_library() -> None:
    tree = ast.parse((PACKAGE / "errors.py").read_text())
    names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert {str(name).partition(".")[0] for name in names} <= {*sys.stdlib_module_names}


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that are there after a statement in a fresh interpreter."""
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "ckpt_component",
        "ckpt_component.storage",
        "ckpt_component.process",
        "ckpt_component.callers",
        "ckpt_component.writers",
        "ckpt_component.config.resolve",
        "ckpt_component._hydra_searchpath",
    ],
)
def test_imports_no_torch(module: str) -> None:
    assert "torch" not in loaded_by(f"import {module}")


@pytest.mark.parametrize(
    "module",
    [
        "ckpt_component.errors",
        "ckpt_component.process.byte_worker",
        "ckpt_component.writers.byte_io",
        *sorted(f"ckpt_component.{name_of(path)}" for path in (PACKAGE / "storage").glob("*.py")),
    ],
)
def test_the_writer_process_imports_the_standard_library_and_us_alone(module: str) -> None:
    ours = {"ckpt_component", "__main__"}
    startup = loaded_by("pass")  # .pth files of the environment import what they like
    assert loaded_by(f"import {module}") - {*sys.stdlib_module_names} - ours <= startup
