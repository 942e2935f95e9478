"""`ckpt import`: checkpoints of other programs become committed ones of ours, with equal values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from ckpt_component import build_checkpointer, build_manager
from ckpt_component.cli.app import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def ckpt(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main([*map(str, arguments)])
    assert isinstance(left.value.code, int)
    return left.value.code, *capsys.readouterr()


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a.w": torch.randn(300, 7), "a.b": torch.randn(()), "empty": torch.zeros(0, 3), "t": torch.randn(4, 5).t()}


def stock(folder: Path) -> Path:
    dcp.save({"net": weights(), "step": 3}, checkpoint_id=folder / "stock")
    return folder / "stock"


def lightning(folder: Path) -> Path:
    tensors = weights()
    tensors |= {"tied": tensors["a.w"], "part": tensors["a.w"][:10]}
    state = {"state_dict": tensors, "epoch": 2, "optimizer_states": [{"param_groups": [{"lr": 0.1}]}]}
    torch.save(state, folder / "last.ckpt")
    return folder / "last.ckpt"


def hugging_face(folder: Path) -> Path:
    (folder / "hf").mkdir()
    tensors = {key: value.contiguous() for key, value in weights().items()}
    for number, keys in ((1, ["a.w", "empty"]), (2, ["a.b", "t"])):
        save_file({key: tensors[key] for key in keys}, folder / "hf" / f"model-{number}.safetensors")
    index = {"weight_map": {"a.w": "model-1.safetensors", "empty": "model-1.safetensors"}}
    index["weight_map"] |= {"a.b": "model-2.safetensors", "t": "model-2.safetensors"}
    (folder / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder / "hf"


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (stock, []),
        (lightning, ["--rename", "state_dict=net", "--ignore", "optimizer_states"]),
        (hugging_face, ["--prefix", "net"]),
    ],
)
def test_a_checkpoint_of_any_program_becomes_one_to_resume_from(
    make: Callable[[Path], Path],
    options: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, root = make(tmp_path), tmp_path / "root"
    code, text, error = ckpt(capsys, "import", source, root, "--step", 40, *options)
    assert code == 0, error
    assert str(root / "iter_0000040") in text
    state: dict[str, Any] = {"net": {key: torch.empty_like(value) for key, value in weights().items()}}
    with build_manager("sync", dir=root) as manager:
        assert manager.restore(state) == 40
        assert manager.steps() == [40]
    assert all(torch.equal(value, state["net"][key]) for key, value in weights().items())
    if make is lightning:
        with build_checkpointer("sync") as checkpointer:
            net = checkpointer.load(root / "iter_0000040")["net"]
        assert net["tied"].data_ptr() == net["a.w"].data_ptr() and net["part"].equal(net["a.w"][:10])


def test_an_import_goes_by_the_names_that_are_there_and_replaces_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, root = lightning(tmp_path), tmp_path / "root"
    with build_manager("sync", ["checkpoint.naming=step", "checkpoint.save.every_steps=1"], dir=root) as manager:
        manager.save(7, {"x": 1})
    assert ckpt(capsys, "import", source, root, "--step", 9)[0] == 0
    assert (root / "step_00000009").is_dir() and (root / "latest").read_text() == "9"
    code, _, error = ckpt(capsys, "import", source, root, "--step", 9)
    assert code == 2 and "already exists" in error


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["SRC", "ROOT", "--step", "-1"], "must be from 0 to 9"),
        (["SRC", "ROOT", "--step", "1", "--rename", "state_dct=net"], "Did you mean 'state_dict'?"),
        (["SRC", "ROOT", "--step", "1", "--ignore", "epch"], "Did you mean 'epoch'?"),
        (["nowhere", "ROOT", "--step", "1"], "does not exist"),
    ],
)
def test_what_is_mistyped_is_told(
    arguments: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"SRC": str(lightning(tmp_path)), "ROOT": str(tmp_path / "root")}
    code, _, error = ckpt(capsys, "import", *(names.get(word, word) for word in arguments))
    assert code == 2 and text in error
    assert not (tmp_path / "root").exists()


def test_damage_is_told_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    build_checkpointer("sync").save({"w": torch.ones(1000)}, tmp_path / "ours")
    (data,) = (tmp_path / "ours").glob("__0_0.distcp")
    content = bytearray(data.read_bytes())
    content[content.index(b"\x00\x00\x80\x3f" * 20) + 4] ^= 1
    data.write_bytes(content)
    with pytest.raises(SystemExit):
        main(["import", str(tmp_path / "ours"), str(tmp_path / "imported"), "--step", "1"])
    assert capfd.readouterr().err.count("is damaged") == 1
