"""Tests see what users see: no private name of our packages is read or replaced outside `tests/support/inside.py`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PACKAGES = ("ckpt_component", "benchmarks/ckpt_bench", "examples/ckpt_train")

_SECONDS = "a time that a test does not wait for"
#: Names of other libraries, which ours have too.
_THEIRS = {
    *("_exit", "_args"),  # of os, and of multiprocessing
    *("_target_", "_recursive_"),  # keys of Hydra
    "_version",  # of torch's tensors
    *("_ActiveAsyncRequest", "_async_calls_queue", "_get_async_caller", "_results_queue"),  # of NVRx and Megatron
    "_batches_that_stepped",  # of Lightning
}
#: Place and name -> why there is no other way.
ACCEPTED = {
    ("cloud/test_loads.py", "_PATIENCE"): _SECONDS,
    ("cloud/test_object_requests.py", "_PART_BYTES"): "each part of an upload is a request, to be failed in turn",
    ("faults/test_no_locks.py", "_YOUNG_SECONDS"): _SECONDS,
    ("integrations/scripts/torchtitan_job.py", "_manager"): "torchtitan's trainer has no way to wait for a checkpoint",
    ("integrations/test_submitit.py", "_process"): "of submitit's jobs",
    ("loading/test_buckets.py", "_PATIENCE"): _SECONDS,
    ("saving/scripts/alone.py", "_LOOK_SECONDS"): _SECONDS,
    ("saving/scripts/alone.py", "_WARN_SECONDS"): _SECONDS,
    ("storage/test_nfs_client.py", "_CLOSE_SECONDS"): _SECONDS,
    ("test_progress.py", "_DELAY_SECONDS"): _SECONDS,
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_names() -> set[str]:
    """Those that our packages define: functions, classes, variables, attributes."""
    names = set[str]()
    for package in PACKAGES:
        for path in (TESTS.parent / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    names.add(node.name)
                elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
                    names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return set(filter(is_private, names)) - _THEIRS


def name_of(node: ast.expr) -> str:
    """The last word of a name such as `patch.setattr`; "" for what is no name."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def read_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Private names that are read of something else than `self`, imported, or named as text to be replaced."""
    nodes = [*ast.walk(tree)]
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            own.add(node.attr)
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            is_super = isinstance(node.value, ast.Call) and name_of(node.value.func) == "super"
            names = [node.attr] if is_super or node.attr not in own else []
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ckpt_"):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and name_of(node.func).endswith(("setattr", "getattr", "delattr")):
            texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
            names = [text.rpartition(".")[2] for text in texts if isinstance(text, str)]
        yield from ((getattr(node, "lineno", 0), name) for name in names if is_private(name))


def test_tests_read_no_private_name_of_ours() -> None:
    ours, found = private_names(), dict[tuple[str, str], int]()
    assert len(ours) > 1000
    for path in TESTS.rglob("*.py"):
        place = str(path.relative_to(TESTS))
        if place != "support/inside.py":
            found |= {(place, name): line for line, name in read_in(ast.parse(path.read_text())) if name in ours}
    wrong = [f"{place}:{found[place, name]} {name}" for place, name in found.keys() - ACCEPTED.keys()]
    assert not wrong, f"use ckpt_component.testing.faults, a parameter, or what a user sees: {sorted(wrong)}"
    assert not ACCEPTED.keys() - found.keys()


def test_every_way_to_a_private_name_is_seen() -> None:
    ways = (
        "manager._last",
        "super()._fill(1)",
        "from ckpt_component.commit import _publish",
        "patch.setattr(module, '_publish', None)",
        "patch.setattr('module._publish', None)",
        "manager._last = 3",
    )
    assert all(list(read_in(ast.parse(way))) for way in ways)
    assert not list(read_in(ast.parse("self._last, module.__name__, _own")))
