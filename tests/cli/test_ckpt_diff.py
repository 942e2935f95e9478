"""`ckpt diff`: keys, forms and values, by checksum, by reading, and by norm; configs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import build_checkpointer, build_manager
from ckpt_component.core.storage.open_files import OpenFiles

GOLDEN = Path(__file__).parents[1] / "loading" / "golden"


def test_values_differ_by_checksum_and_nothing_is_read(
    ckpt: Callable[..., Any], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = ckpt("diff", f"{root}@100", f"{root}@100")
    assert same.code == 0 and "no difference; 11 keys equal; 11 compared by checksum" in same.out
    different = ckpt("diff", f"{root}@100", f"{root}@200", "--json")
    assert different.code == 1
    assert [(each["key"], each["what"], each["before"], each["after"]) for each in different.json["differences"]] == [
        ("model.layers.0.bias", "values", None, None),
        ("epoch", "values", "1", "2"),
    ]
    assert (different.json["equal"], different.json["by_checksum"]) == (9, 11)

    def refuse(*_: Any) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(OpenFiles, "fill", refuse)
    assert ckpt("diff", f"{root}@100", f"{root}@200", "model").code == 1


def test_keys_shapes_and_dtypes(ckpt: Callable[..., Any], tmp_path: Path) -> None:
    with build_manager("sync", dir=tmp_path) as manager:
        tensors = {"a": torch.ones(2), "shape": torch.ones(2, 3), "dtype": torch.ones(4), "kind": torch.ones(1)}
        manager.save(1, tensors)
        manager.save(2, {"b": 5, "shape": torch.ones(3), "dtype": torch.ones(4).half(), "kind": 1.0})
    different = ckpt("diff", f"{tmp_path}@1", f"{tmp_path}@2", "--norm")
    lines = [line.split() for line in different.out.splitlines()[4:9]]
    assert different.code == 1 and lines == [
        ["a", "only", "in", "A", "float32", "2"],
        ["shape", "shape", "float32", "2x3", "->", "float32", "3"],
        ["dtype", "dtype", "0", "0", "0", "float32", "4", "->", "float16", "4"],
        ["kind", "kind", "float32", "1", "->", "object"],
        ["b", "only", "in", "B", "object"],
    ]


def test_the_norm_of_the_difference(ckpt: Callable[..., Any], tmp_path: Path) -> None:
    torch.manual_seed(3)
    a = {"w": torch.randn(700, 1000), "i": torch.arange(5), "c": torch.randn(3, dtype=torch.complex64)}
    b = {name: value + (torch.arange(value.numel()).view(value.shape) % 3).to(value.dtype) for name, value in a.items()}
    with build_manager("sync", dir=tmp_path) as manager:
        manager.save(1, a)
        manager.save(2, {**b, "i": a["i"]})
    found = ckpt("diff", f"{tmp_path}@1", f"{tmp_path}@2", "--norm", "--json").json["differences"]
    assert {each["key"] for each in found} == {"w", "c"}
    for each in found:
        x, y = (state[each["key"]].to(torch.complex128) for state in (a, b))
        assert each["norm"]["absolute"] == pytest.approx(float((y - x).norm()))
        assert each["norm"]["relative"] == pytest.approx(float((y - x).norm() / x.norm()))
        assert each["norm"]["largest"] == pytest.approx(float((y - x).abs().max()))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("torch-2.13/dcp", "torch-2.13/stock_dcp"),
        ("torch-2.13/dcp", "torch-2.13/torch_save"),
        ("torch-2.13/torch_save", "torch-2.7/stock.pt"),
        ("torch-2.7/dcp", "short-archives/dcp"),
    ],
)
def test_equal_values_in_other_formats_and_of_other_releases(a: str, b: str, ckpt: Callable[..., Any]) -> None:
    compared = ckpt("diff", GOLDEN / a, GOLDEN / b, "-q")
    assert compared.code == 0 and "no difference" in compared.out, compared.out + compared.err


def test_one_element_in_another_format(ckpt: Callable[..., Any], tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": torch.ones(2_000_000), "b": torch.ones(3), "n": 3}
    build_checkpointer("sync").save(state, tmp_path / "one")
    state["a"][1_900_000] = 2
    build_checkpointer("sync", overrides=["checkpoint/writer=torch_save"]).save({**state, "n": 4}, tmp_path / "two")
    different = ckpt("diff", tmp_path / "one", tmp_path / "two", "--json")
    assert [(each["key"], each["after"]) for each in different.json["differences"]] == [("a", None), ("n", "4")]


def test_damage_in_what_must_be_read_is_an_error(ckpt: Callable[..., Any], tmp_path: Path) -> None:
    build_checkpointer("sync").save({"a": torch.ones(1000)}, tmp_path / "one")
    build_checkpointer("sync", overrides=["checkpoint/writer=torch_save"]).save(
        {"a": torch.ones(1000)}, tmp_path / "two"
    )
    file = tmp_path / "one" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for option in ([], ["--norm"]):
        compared = ckpt("diff", tmp_path / "one", tmp_path / "two", *option)
        assert compared.code == 2 and "'a' in " in compared.err and "damaged" in compared.err


def test_configs(ckpt: Callable[..., Any], tmp_path: Path, root: Path) -> None:
    with build_manager("sync", dir=tmp_path / "other", overrides=["checkpoint.keep.last=9"]) as manager:
        manager.save(1, {"a": 1})
    changes = ckpt("diff", root, tmp_path / "other", "--config", "--json")
    assert changes.code == 1
    assert {"key": "checkpoint.keep.last", "before": "null", "after": "9"} in changes.json["changes"]
    assert ckpt("diff", f"{root}@100", f"{root}@200", "--config").code == 0


def test_many_differences_and_long_keys(ckpt: Callable[..., Any], tmp_path: Path) -> None:
    with build_manager("sync", dir=tmp_path) as manager:
        manager.save(1, {f"{'x' * 90}{number}": torch.ones(1) for number in range(50)})
        manager.save(2, {f"{'x' * 90}{number}": torch.zeros(1) for number in range(50)})
    text = ckpt("diff", f"{tmp_path}@1", f"{tmp_path}@2").out
    assert "... and 10 more; --all shows them" in text
    assert max(map(len, text.split("\n\n")[1].splitlines())) <= 100
    assert len(ckpt("diff", f"{tmp_path}@1", f"{tmp_path}@2", "--all").out.splitlines()) == 56
