"""What is made for our own use says where it is and of what type: a script may have set other defaults, or a mode."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpt_component

PACKAGE = Path(ckpt_component.__file__).parent
REPOSITORY = PACKAGE.parent

#: Functions of torch that take a device and a dtype, and else the defaults.
MAKES_TENSORS = {
    *(
        "arange",
        "as_tensor",
        "asarray",
        "empty",
        "empty_permuted",
        "empty_strided",
        "eye",
        "full",
        "linspace",
        "logspace",
    ),
    *(
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "range",
        "scalar_tensor",
        "tensor",
        "tril_indices",
        "triu_indices",
    ),
    *("zeros", "sparse_coo_tensor", "sparse_compressed_tensor"),
}
#: What each call must say. What is made like a tensor is where that is; `frombuffer` views memory of the host.
NEEDED = {name: {"device", "dtype"} for name in MAKES_TENSORS} | {
    "frombuffer": {"dtype"},
    "load": {"map_location"},
    "Generator": {"device"},
}
#: Types whose calls make tensors on no device that could be named; there is a function for each.
UNNAMED = {"Tensor", "BoolTensor", "ByteTensor", "DoubleTensor", "FloatTensor", "HalfTensor", "IntTensor", "LongTensor"}
#: Where the defaults are meant, and why.
AS_SCRIPTS_DO = {
    "ckpt_component/loading/meta_tensors.py": "the default device, which torch has no other name for",
    "ckpt_component/testing/conformance/connected_parts.py": "a state as a script makes it",
    "ckpt_component/testing/conformance/stager_contract.py": "tensors as a script makes them",
    "ckpt_component/testing/conformance/writer_contract.py": "tensors as a script makes them",
}


def unsaid_in(path: Path) -> Iterator[str]:
    """The calls in a module that make a tensor and leave to the defaults what it is."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"):
            continue
        name, said = node.func.attr, {word.arg for word in node.keywords}
        if name == "Generator" and node.args:
            continue
        if missing := NEEDED.get(name, set()) - said:
            yield f"line {node.lineno}: torch.{name}() without {' and '.join(sorted(missing))}"
        elif name in UNNAMED:
            yield f"line {node.lineno}: torch.{name}()"


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["ckpt_component", "benchmarks/ckpt_bench", "examples/ckpt_train"])
def test_what_we_make_says_its_device_and_dtype(folder: str) -> None:
    found = {
        str(path.relative_to(REPOSITORY)): calls
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        if (calls := [*unsaid_in(path)])
    }
    assert {name: calls for name, calls in found.items() if name not in AS_SCRIPTS_DO} == {}
    needless = {name for name in AS_SCRIPTS_DO if name.startswith(folder)} - found.keys()
    assert not needless, "an exception that is not needed any more"


def test_a_constructor_that_leaves_something_to_the_defaults_is_seen(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "torch.empty(0)\ntorch.empty(0, dtype=int)\ntorch.zeros(1, dtype=int, device='cpu')\ntorch.load(path)\n"
        "torch.frombuffer(data, dtype=int)\ntorch.Generator()\ntorch.Generator('cpu')\ntorch.FloatTensor(3)\n"
        "torch.zeros_like(one)\n"
    )
    assert [*unsaid_in(module)] == [
        "line 1: torch.empty() without device and dtype",
        "line 2: torch.empty() without device",
        "line 4: torch.load() without map_location",
        "line 6: torch.Generator() without device",
        "line 8: torch.FloatTensor()",
    ]
