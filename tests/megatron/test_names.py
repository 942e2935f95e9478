"""The names that Megatron takes from its async strategy are ours: of its newest source, and of the releases here."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest
from megatron_places import PLACES, name_of, package_of

from ckpt_component.megatron.installing import HOMES
from ckpt_component.megatron.taken_names import NAMES

NEWEST = Path(__file__).with_name("names.txt")
STRATEGIES = "core/dist_checkpointing/strategies/torch.py"
NVRX = "nvidia_resiliency_ext.checkpointing.async_ckpt."


def difference(taken: Iterable[str], ours: Iterable[str], source: str) -> str:
    """Empty if the names are the same; else one line for each that is not."""
    lines = [f"+ {name}: {source} takes it, ckpt_component.megatron has none" for name in sorted({*taken} - {*ours})]
    lines += [f"- {name}: ckpt_component.megatron has it, {source} does not take it" for name in {*ours} - {*taken}]
    return "\n".join(sorted(lines))


def names_returned(source: str) -> set[str]:
    """Keys of the dictionaries with names that `get_async_strategy` makes."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    made = [node for node in functions if node.name in ("get_async_strategy", "_import_mcore_async")]
    keys = [key for function in made for node in ast.walk(function) if isinstance(node, ast.Dict) for key in node.keys]
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def imported_from_nvrx(source: str) -> dict[str, set[str]]:
    """Module of NVRx's async_ckpt -> the names that a file imports from it."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(NVRX):
            found.setdefault(str(node.module), set()).update(alias.name for alias in node.names)
    return found


def test_the_newest_source_takes_our_names() -> None:
    lines = NEWEST.read_text().splitlines()
    newest = [line for line in lines if not line.startswith("#")]
    different = difference(newest, NAMES, lines[1].removeprefix("# "))
    assert not different, different
    assert sorted(name for names in HOMES.values() for name in names) == sorted(NAMES)


def test_a_difference_is_readable() -> None:
    source = "def get_async_strategy(name):\n    return name, {'AsyncRequest': 1, 'AsyncThing': 2}\n"
    taken = names_returned(source)
    assert difference(taken, ["AsyncRequest", "_results_queue"], "Megatron 1.0").splitlines() == [
        "+ AsyncThing: Megatron 1.0 takes it, ckpt_component.megatron has none",
        "- _results_queue: ckpt_component.megatron has it, Megatron 1.0 does not take it",
    ]


@pytest.mark.parametrize("place", PLACES, ids=name_of)
def test_a_release_takes_our_names(place: str) -> None:
    package = package_of(place)
    if package is None:
        pytest.skip("needs megatron-core (pip install --no-deps megatron-core==0.16.1)")
    source = (package / STRATEGIES).read_text()
    taken = names_returned(source)
    if "def get_async_strategy" in source:
        different = difference(taken, NAMES, name_of(place))
        assert not different, different
    else:
        assert "import FileSystemWriterAsync" in source  # megatron-core before 0.17 imports them from its own modules


@pytest.mark.parametrize("place", PLACES, ids=name_of)
def test_what_a_release_imports_from_nvrx_is_ours(place: str) -> None:
    package = package_of(place)
    if package is None:
        pytest.skip("needs megatron-core (pip install --no-deps megatron-core==0.16.1)")
    missing = []
    for file in [*(package / "core/dist_checkpointing").rglob("*.py"), *(package / "training").rglob("*.py")]:
        for module, names in imported_from_nvrx(file.read_text()).items():
            unknown = names - {*HOMES.get(module, ())}
            missing += [f"+ {module}.{name}, imported by {file.relative_to(package)}" for name in sorted(unknown)]
    assert not missing, "\n".join(missing)
