"""Checkpoints that older versions made still load. `golden/make.py` made them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import build_checkpointer

GOLDEN = Path(__file__).parent / "golden"
KINDS = ("dcp", "torch_save", "safetensors", "stock_dcp", "stock.pt", "legacy.pt", "stock.safetensors")
MADE = [path for folder in sorted(GOLDEN.iterdir()) for kind in KINDS if (path := folder / kind).exists()]


def wanted(kind: str) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("golden_make", GOLDEN / "make.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    state: dict[str, Any] = made.state(objects="safetensors" not in kind)
    if kind == "stock.safetensors":
        del state["nested"]
    if kind == "legacy.pt":
        del state["eight"]
    return state


def assert_same(found: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert bytes(found.reshape(-1).view(torch.uint8).tolist()) == bytes(
            value.reshape(-1).view(torch.uint8).tolist()
        )
    elif isinstance(value, dict):
        assert list(found) == list(value) if type(value) is not dict else found.keys() == value.keys()
        for key in value:
            assert_same(found[key], value[key])
    elif isinstance(value, list):
        assert len(found) == len(value)
        for one, other in zip(found, value, strict=True):
            assert_same(one, other)
    else:
        assert found == value and type(found) is type(value)


def zeros(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: zeros(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [zeros(inner) for inner in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def test_there_are_some_of_two_torch_versions_and_of_before_and_after_what_changed() -> None:
    folders = {"before-checksum-names", "torch-2.7", "torch-2.13", "short-archives"}
    assert {path.parent.name for path in MADE} == folders
    assert len(MADE) == 3 + 2 * len(KINDS) + 1
    table = json.loads((GOLDEN / "before-checksum-names" / "dcp" / "integrity-0.json").read_bytes())
    assert "crc32" in table and "sums" not in table
    # Items were whatever torch.save wrote, and have only what loading needs since.
    sizes = [(GOLDEN / folder / "dcp" / "__0_0.distcp").stat().st_size for folder in ("torch-2.13", "short-archives")]
    assert sizes[0] > 2 * sizes[1]


@pytest.mark.parametrize("path", MADE, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_golden_checkpoints_load(path: Path) -> None:
    with build_checkpointer("sync") as ours:
        found = ours.load(path)
        state = wanted(path.name)
        if path.name == "stock_dcp":
            # Stock DCP opens an OrderedDict like any dict, and does not note its kind.
            state["ordered"] = dict(state["ordered"])
        assert_same(found, state)
        target = zeros(state)
        ours.load(path, target, strict=True, allow_unexpected=False)
        assert_same(target, state)


@pytest.mark.parametrize("python", ["3.13", "Windows"])
def test_paths_of_other_pythons_in_metadata(python: str, tmp_path: Path) -> None:
    """DCP notes its folder as an object of pathlib, which Python 3.13 has in another module."""
    (tmp_path / "one").mkdir()
    for part in (GOLDEN / "torch-2.13" / "stock_dcp").iterdir():
        (tmp_path / "one" / part.name).write_bytes(part.read_bytes())
    metadata = tmp_path / "one" / ".metadata"
    data = metadata.read_bytes()
    old, new = (
        (b"\x8c\x07pathlib", b"\x8c\x0epathlib._local") if python == "3.13" else (b"\x8c\x09Posix", b"\x8c\x0bWindows")
    )
    assert data.count(old) == 1
    # The pickle's one frame grows with it.
    frame = int.from_bytes(data[3:11], "little") + len(new) - len(old)
    metadata.write_bytes(data[:3] + frame.to_bytes(8, "little") + data[11:].replace(old, new))
    with build_checkpointer("sync") as ours:
        assert ours.load(tmp_path / "one")["step"] == 12
