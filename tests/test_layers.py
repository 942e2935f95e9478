"""The layers: a package imports only from those below it, no module imports itself in a circle, and who needs torch."""

from __future__ import annotations

import ast
import functools
import re
import runpy
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import ckpt_component

PACKAGE = Path(ckpt_component.__file__).parent

LAYERS = runpy.run_path(str(PACKAGE.parent / "docs" / "layers.py"))["LAYERS"]
LEVEL = {package: level for level, package in enumerate(package for layer in LAYERS.values() for package in layer)}
#: Modules that anybody may import without torch, with all that they import themselves.
WITHOUT_TORCH = (
    "core.processes",
    "core.storage",
    "core.commit",
    "formats",
    "core.writing",
    "events",
    "config",
    "publishing",
)
#: Which of their modules have torch make values of a state, or read tensors.
WITH_TORCH = tuple(
    f"formats.{name}"
    for name in [
        "dcp",
        "dcp_pickle",
        "foreign",
        "named_files",
        "open_source",
        "ranges",
        "source",
        "torch_save",
        "zip_records",
    ]
)
#: Only these read or make configs of Hydra.
WITH_HYDRA = ("config.hydra", "factory", "megatron", "cli", "integrations", "_hydra_searchpath")


def name_of(path: Path) -> str:
    """`core.storage.files` for its path; a package has the name of its folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


#: By name, without the package itself.
MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py")) if name_of(path)}


def package_of(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2] if parts[0] == "core" else parts[:1])


@functools.cache
def imports_of(path: Path) -> tuple[str, ...]:
    """Full names that a module imports, inside functions and for type checkers too."""
    own, names = ["ckpt_component", *path.relative_to(PACKAGE).with_suffix("").parts], list[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = own[: len(own) - node.level] if node.level else []
            names += [".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names]
    return tuple(names)


def ours(path: Path) -> Iterator[str]:
    """The modules of this package that a module imports."""
    for name in imports_of(path):
        if name.startswith("ckpt_component."):
            module = name.removeprefix("ckpt_component.")
            while module not in MODULES and "." in module:
                module = module.rpartition(".")[0]
            yield module


def test_every_module_imports_only_from_packages_below_its_own() -> None:
    wrong = []
    for name, path in MODULES.items():
        if name == "core":
            assert not imports_of(path), "the package `core` has a docstring, and imports nothing"
            continue
        assert package_of(name) in LEVEL, (
            f"{package_of(name)} is a new package: say in docs/layers.py in which layer it is"
        )
        for imported in ours(path):
            if LEVEL.get(package_of(imported), len(LEVEL)) > LEVEL[package_of(name)]:
                wrong.append(f"{name} imports {imported}")
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_in_a_circle() -> None:
    # The `__init__` of a package names what its modules provide, lazily or for users.
    packages = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    left = {name: {*ours(path)} - {name} - packages for name, path in MODULES.items()}
    while free := {name for name, imports in left.items() if not imports & left.keys()}:
        left = {name: imports for name, imports in left.items() if name not in free}
    assert not left, f"circles, and who imports them: {sorted(left)}"


def test_hydra_is_imported_below_config_hydra_and_by_what_runs_its_apps() -> None:
    found = {
        name
        for name, path in MODULES.items()
        if any(imported.partition(".")[0] in ("hydra", "omegaconf") for imported in imports_of(path))
    }
    assert {name for name in found if not name.startswith(WITH_HYDRA)} == set()


def test_only_the_names_of_the_reference_import_torchs_own_checkpointing() -> None:
    users = {
        package_of(name)
        for name, path in MODULES.items()
        if any(imported.startswith("torch.distributed.checkpoint") for imported in imports_of(path))
    }
    assert users == {"compat"}


def test_the_errors_import_nothing_but_the_standard_library() -> None:
    names = {name.partition(".")[0] for name in imports_of(PACKAGE / "errors.py")}
    assert names <= {*sys.stdlib_module_names}


def loaded_by(modules: Iterable[str]) -> dict[str, set[str]]:
    """For each module, imported in this order by a fresh interpreter, the top-level modules that it adds.

    The first entry, "", has what is there before: `.pth` files of the environment import what they like.
    """
    code = """
import sys
before = set()
for module in ["", *sys.argv[1:]]:
    if module:
        __import__(module)
    there = {name.partition(".")[0] for name in sys.modules}
    print(module, *sorted(there - before))
    before = there
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *modules],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {module: set(names) for module, *names in (line.split(" ") for line in done.stdout.splitlines())}


def test_no_module_of_a_package_without_torch_imports_it() -> None:
    # Listeners import the trackers they send to, which may import anything.
    theirs = ("events.mlflow", "events.opentelemetry", "events.tensorboard", "events.wandb")
    names = [
        name
        for package in WITHOUT_TORCH
        for name in MODULES
        if f"{name}.".startswith(f"{package}.") and name not in {*theirs, *WITH_TORCH}
    ]
    alone = ["compat", "callers", "writers", "cli.app"]
    alone += [f"background.{name}_process" for name in ("upload", "export", "publish")]
    modules = ["ckpt_component", *(f"ckpt_component.{name}" for name in [*names, *alone, "_hydra_searchpath"])]
    assert [module for module, added in loaded_by(modules).items() if "torch" in added] == []


def test_the_writer_process_imports_the_standard_library_and_us_alone() -> None:
    packages = ("core.storage", "core.commit", "core.processes")
    names = ["errors", "core.writing.worker", "core.writing.write_job"]
    names += [name for name in MODULES if package_of(name) in packages]
    loaded = loaded_by(f"ckpt_component.{name}" for name in names)
    loaded.pop("")
    theirs = {module: added - {*sys.stdlib_module_names} - {"ckpt_component"} for module, added in loaded.items()}
    assert {module: added for module, added in theirs.items() if added} == {}


def test_one_module_calls_the_c_library() -> None:
    users = [name for name, path in MODULES.items() if re.search(r"^\s*(import|from) ctypes\b", path.read_text(), re.M)]
    assert users == ["core.libc"]
