"""The words of the code: class and file names stand once, and what docstrings list has one form."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
ROOTS = ("ckpt_component", "benchmarks/ckpt_bench", "examples/ckpt_train")
FILES = sorted(path for root in ROOTS for path in (REPOSITORY / root).rglob("*.py"))

#: Names of public classes that mean two things: a part and its config, and what frameworks call alike.
PUBLIC = {
    *("LiveStager", "PinnedStager", "SharedMemoryStager", "ZeroOverheadStager"),
    *("InlineCaller", "TemporalCaller", "PersistentCaller"),
    *("DcpWriter", "TorchSaveWriter", "SafetensorsWriter"),
    "CheckpointCallback",
}
#: File names that stand for one thing in several packages: a format, a program, a schema of configs, a base class.
ALIKE = {"dcp", "safetensors", "torch_file", "torch_save", "app", "schema", "base"}
#: Docstring sections with entries `name: fragment`.
_SECTION = re.compile(r"^( *)(Args|Attributes|Raises):\n((?:\1 +.*\n|\n)*)", re.M)
_ENTRY = re.compile(r"^    (\*{0,2}[A-Za-z_][\w.]*(?:, [\w.]+)*): +(.*(?:\n     +.*)*)", re.M)
_SENTENCE_ENDS = re.compile(r"[.!?]\)?\s+[A-Z`(\[\"']")
#: First words with a capital of their own.
_NAMES = re.compile(
    "Accelerate Adam Axolotl Azure Bridge Daly Euclidean False Git Hugging Hydra I Lightning Linux Markdown Megatron None Perfetto "
    "Prometheus Python Slurm Trainer True Unix".replace(" ", "|")
)


def test_a_class_name_stands_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path.relative_to(REPOSITORY)}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1 and name not in PUBLIC} == {}


def test_a_file_name_stands_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        if not path.stem.startswith("__"):
            places[path.stem].append(str(path.relative_to(REPOSITORY)))
    assert {name: where for name, where in places.items() if len(where) > 1 and name not in ALIKE} == {}


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield (ast.get_docstring(node) or "") + "\n"


def wrong_entries(docstring: str) -> Iterator[str]:
    """Entries whose text begins with a capital, or is one fragment and has a full stop."""
    for indent, _, body in _SECTION.findall(docstring):
        for name, text in _ENTRY.findall(re.sub(f"^{indent}", "", body, flags=re.M)):
            word = re.match(r"[A-Za-z]+", text)
            capital = word and (
                word[0].istitle() and not _NAMES.fullmatch(word[0]) and (len(word[0]) > 1 or word[0] == "A")
            )
            stops = text.endswith(".") and not text.endswith("..") and not _SENTENCE_ENDS.search(text)
            if capital or stops:
                yield f"{name}: {text.splitlines()[0]}"


def test_what_docstrings_list_begins_small_and_ends_without_a_full_stop() -> None:
    wrong = {
        str(path.relative_to(REPOSITORY)): [
            entry for docstring in docstrings(path) for entry in wrong_entries(docstring)
        ]
        for path in FILES
    }
    assert {path: entries for path, entries in wrong.items() if entries} == {}


@pytest.mark.parametrize(
    ("text", "is_wrong"),
    [
        ("path: the folder", False),
        ("path: The folder", True),
        ("path: the folder.", True),
        ("path: the folder. It is created.", False),
        ("path: the folder,\n        which exists.", True),
        ("path: Hydra's folder", False),
        ("path: CPU seconds", False),
        ("first, second: the folders ...", False),
    ],
)
def test_the_form_of_an_entry(text: str, is_wrong: bool) -> None:
    assert bool([*wrong_entries(f"Do it.\n\nArgs:\n    {text}\n\nReturns:\n    The path.\n")]) == is_wrong
