"""`ckpt show`: the tree of keys, its totals and folded siblings, patterns, and the stored config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ckpt_component import build_checkpointer
from ckpt_component.cli.show_command import ranges_text


def rows(text: str) -> list[list[str]]:
    """The lines of the table, without its header, as words."""
    return [line.split() for line in text.split("\n\n", 1)[1].splitlines()[1:]]


def test_layers_are_folded_where_they_are_equal(ckpt: Callable[..., Any], root: Path) -> None:
    shown = ckpt("show", root)
    assert shown.out.splitlines()[0] == str(root / "iter_0000400")
    assert "dcp, 1 rank" in shown.out and "checksums crc32" in shown.out and "val_loss 2" in shown.out
    assert rows(shown.out) == [
        ["model", "mixed", "9", "tensors", "648", "bytes"],
        ["layers", "float32", "8", "tensors", "640", "bytes"],
        ["0-3", "(4", "alike)", "float32", "8", "tensors", "640", "bytes"],
        ["weight", "float32", "8x4", "128", "bytes"],
        ["bias", "float32", "8", "32", "bytes"],
        ["head", "bfloat16", "4", "8", "bytes"],
        ["epoch", "object", "4"],
        ["lr", "object", "0.1"],
    ]
    assert len(rows(ckpt("show", root, "--depth", 1).out)) == 3


def test_what_is_shared_with_other_checkpoints(ckpt: Callable[..., Any], root: Path, sharing: Path) -> None:
    facts = ckpt("show", f"{sharing}@4").out.splitlines()[1]
    assert facts.startswith("dcp, 1 rank, 1.") and " MB shared with others), 2 tensors" in facts
    data = ckpt("show", f"{sharing}@4", "--json").json
    assert data["nbytes"] > data["shared_bytes"] > 1_000_000 > 100_000 > data["nbytes"] - data["shared_bytes"]
    assert ckpt("show", root, "--json").json["shared_bytes"] == 0 and "with others" not in ckpt("show", root).out


def test_a_layer_that_differs_stands_alone(ckpt: Callable[..., Any], tmp_path: Path) -> None:
    layers = {str(number): {"weight": torch.ones(4 + (number == 5))} for number in range(10)}
    build_checkpointer("sync").save({"layers": layers}, tmp_path / "step_7")
    names = [row[0] for row in rows(ckpt("show", tmp_path / "step_7").out)]
    assert names == ["layers", "0-4,6-9.weight", "5.weight"]


def test_ranges() -> None:
    assert ranges_text([0, 1, 2, 5, 7]) == "0-2,5,7"
    assert ranges_text([1, 3, 5, 7, 9]) == "1,3,...,9"


def test_patterns_and_flat_lines(ckpt: Callable[..., Any], root: Path) -> None:
    flat = ckpt("show", root, "model.layers.*.bias", "--flat").out.splitlines()[3:]
    assert flat == [f"float32  8  32  model.layers.{number}.bias" for number in range(4)]
    data = ckpt("show", f"{root}@100", "model.layers.2", "--json").json
    assert [entry["key"] for entry in data["entries"]] == ["model.layers.2.weight", "model.layers.2.bias"]
    assert data["entries"][0]["shape"] == [8, 4] and data["entries"][0]["dtype"] == "float32"
    assert (data["step"], data["ranks"], data["verified"], data["tensors"], data["objects"]) == (100, 1, True, 9, 2)
    wrong = ckpt("show", root, "model.layer")
    assert wrong.code == 2 and "did you mean 'model.layers'?" in wrong.err


def test_long_keys_are_cut_in_the_middle(ckpt: Callable[..., Any], tmp_path: Path) -> None:
    torch.save({"x" * 150: torch.ones(2, 3), "b": torch.ones(1)}, tmp_path / "long.pt")
    shown = ckpt("show", tmp_path / "long.pt").out
    assert max(map(len, shown.split("\n\n", 1)[1].splitlines())) <= 100 and "2x3" in shown


def test_the_stored_config(ckpt: Callable[..., Any], root: Path) -> None:
    shown = ckpt("show", root, "--config").out
    assert shown.startswith("# ckpt_component ")
    assert yaml.safe_load(shown)["checkpoint"]["keep"]["best"]["metric"] == "val_loss"
    assert ckpt("show", root, "--config", "--json").json["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("damage", ["__0_0.distcp", "integrity-0.json", "manifest.json"])
def test_a_damaged_checkpoint_is_an_error_in_one_line(damage: str, ckpt: Callable[..., Any], root: Path) -> None:
    path = root / "iter_0000400" / damage
    path.write_bytes(path.read_bytes()[:-9])
    shown = ckpt("show", f"{root}@400")
    assert shown.code == 2 and damage in shown.err and shown.err.count("\n") == 1 and not shown.out


def test_a_folder_before_the_at_that_does_not_exist(ckpt: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    assert (
        f"{tmp_path}/rnus does not exist; did you mean {tmp_path}/runs?" in ckpt("show", tmp_path / "rnus@newest").err
    )


def test_values_of_small_objects(ckpt: Callable[..., Any], tmp_path: Path) -> None:
    state = {"name": "gpt", "big": "x" * 100_000, "none": None, "nested": {"on": True}, "spoilt": 7}
    build_checkpointer("sync").save(state, tmp_path / "step_7")
    data = next((tmp_path / "step_7").glob("*.distcp"))
    entries = {each["key"]: each for each in ckpt("show", tmp_path / "step_7", "--json").json["entries"]}
    values = {key: each["value"] for key, each in entries.items()}
    assert values == {"name": "'gpt'", "big": None, "none": "None", "nested.on": "True", "spoilt": "7"}
    content = data.read_bytes()
    at = content.rindex(b"K\x07")
    data.write_bytes(content[:at] + b"K\x08" + content[at + 2 :])
    flat = ckpt("show", tmp_path / "step_7", "--flat")
    assert flat.code == 0 and "damaged" in next(line for line in flat.out.splitlines() if line.endswith("spoilt"))
