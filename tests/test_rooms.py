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

#: First to last; a room imports from itself and from those above it in this list.
ORDER = (
    "errors",
    "_lazy",
    "options",
    "spelling",
    "progress",
    "home_process",
    "memory",
    "storage",
    "events",
    "state",
    "image",
    "writing",
    "formats",
    "catalogue",
    "coordination",
    "readers",
    "exporting",
    "uploading",
    "callers",
    "stagers",
    "saving",
    "checkpointer",
    "managing",
    "config",
    "factory",
    "compat",
    "integrations",
    "megatron",
    "testing",
    "writers",
    "apps",
    "train",
    "_hydra_searchpath",
)
LEVEL = {room: level for level, room in enumerate(ORDER)}
#: Upward imports that are names alone, made when somebody asks for them.
EXCEPTIONS = {("callers", "compat"), ("storage.locate", "testing")}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def name_of(path: Path) -> str:
    """`storage.files` for ckpt_component/storage/files.py; a room's `__init__` has the room's name."""
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


def test_every_module_imports_only_from_rooms_before_its_own() -> None:
    wrong = []
    for path in modules():
        name = name_of(path)
        room = name.partition(".")[0]
        assert room in LEVEL, f"{room} is a new room: say in ORDER where it stands"
        for imported in imports_of(path):
            target = imported.partition(".")[0]
            if target == "__version__" or (name, target) in EXCEPTIONS:
                continue
            if target not in LEVEL or LEVEL[target] > LEVEL[room]:
                wrong.append(f"{name} imports {imported}")
    assert not wrong, "\n".join(wrong)


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
        "ckpt_component.events",
        "ckpt_component.catalogue",
        "ckpt_component.compat",
        "ckpt_component.callers",
        "ckpt_component.uploading.process",
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
        "ckpt_component.writing.worker",
        "ckpt_component.writing.write_job",
        *sorted(f"ckpt_component.{name_of(path)}" for path in (PACKAGE / "storage").glob("*.py")),
    ],
)
def test_the_writer_process_imports_the_standard_library_and_us_alone(module: str) -> None:
    ours = {"ckpt_component", "__main__"}
    startup = loaded_by("pass")  # .pth files of the environment import what they like
    assert loaded_by(f"import {module}") - {*sys.stdlib_module_names} - ours <= startup
