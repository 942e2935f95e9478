"""Every stager x caller x writer: the state of the moment of save(), or a refusal in words."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from strides import in_turn

from ckpt_component import CheckpointConfigError, build_checkpointer
from ckpt_component.config.schema import PARTS

#: A part that is registered is here.
PAIRS = list(itertools.product(PARTS["stager"], PARTS["caller"], PARTS["writer"]))
REFUSED = [pair for pair in PAIRS if pair[0] == "none" and pair[1] != "inline"]
WORKING = [pair for pair in PAIRS if pair not in REFUSED]


def make_state() -> dict[str, Any]:
    torch.manual_seed(3)
    base = torch.randn(10, 12)
    model = {
        "weight": torch.randn(700, 300),
        "transposed": base.t(),
        "view": base[2:5],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5),
        "bfloat16": torch.randn(7).bfloat16(),
        "float8": torch.randn(9).to(torch.float8_e4m3fn),
        "complex": torch.randn(3, dtype=torch.complex64),
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        "flags": torch.tensor([True, False, True]),
        "uint16": torch.tensor([1, 2], dtype=torch.uint16),
        "column": torch.randn(5, 4)[:, 1],
    }
    model["tied"] = model["weight"]
    return model


def overwrite(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.copy_(torch.ones(tensor.shape).to(tensor.dtype))


def as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.resolve_conj().contiguous().flatten().view(torch.uint8).tolist())


def config_of(pair: tuple[str, str, str], workers: int = 2) -> list[str]:
    stager, caller, writer = pair
    return [
        f"checkpoint/stager={stager}",
        f"checkpoint/caller={caller}",
        f"checkpoint/writer={writer}",
        f"checkpoint.writer.workers={workers}",
    ]


def load_by_stock(path: Path, writer: str, expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if writer == "dcp":
        target: dict[str, dict[str, torch.Tensor]] = {
            "model": {key: torch.zeros_like(value) for key, value in expected.items()}
        }
        dcp.load(target, checkpoint_id=str(path))
        return target["model"]
    if writer == "torch_save":
        model: dict[str, torch.Tensor] = torch.load(path / "checkpoint_0.pt", weights_only=True)["model"]
        return model
    safetensors = pytest.importorskip("safetensors.torch")
    flat = safetensors.load_file(path / "checkpoint_0.safetensors")
    loaded = {key.removeprefix("model."): value for key, value in flat.items()}
    loaded["tied"] = loaded["weight"]
    return loaded


@pytest.mark.turns(3)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("pair", in_turn(((pair,) for pair in WORKING), 3), ids="-".join)
def test_the_checkpoint_is_the_state_of_the_moment_of_save(pair: tuple[str, str, str], tmp_path: Path) -> None:
    model = make_state()
    expected = {key: as_bytes(value) for key, value in model.items()}
    state: dict[str, Any] = {"model": model}
    if pair[2] != "safetensors":
        state["step"] = 7
        state["nested"] = {1: [1, 2], "none": None, "empty": {}}
    with build_checkpointer("async_persistent", config_of(pair)) as checkpointer:
        for number in range(2):
            futures = checkpointer.save(state, tmp_path / str(number))
            checkpointer.wait_staged()
            overwrite(model)
            if "step" in state:
                state["step"] = 8
                state["nested"][1].append(3)
            if futures is not None:
                futures[0].result(30)
                report = futures[1].result(60)
                assert report.outcome == "committed"
            stock = load_by_stock(tmp_path / str(number), pair[2], model)
            assert {key: as_bytes(value) for key, value in stock.items()} == expected
            loaded = checkpointer.load(tmp_path / str(number))
            assert {key: as_bytes(value) for key, value in loaded["model"].items()} == expected
            if "step" in state:
                assert (loaded["step"], loaded["nested"]) == (7, {1: [1, 2], "none": None, "empty": {}})
            into = {"model": {key: torch.zeros_like(value) for key, value in model.items()}}
            assert checkpointer.load(tmp_path / str(number), into, strict=True) is into
            assert {key: as_bytes(value) for key, value in into["model"].items()} == expected
            for key, raw in expected.items():
                if raw:
                    fresh = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(model[key].dtype)
                    model[key].copy_(fresh.view(model[key].shape))
            if "step" in state:
                state["step"] = 7
                state["nested"][1].pop()


@pytest.mark.parametrize("pair", REFUSED, ids="-".join)
def test_live_tensors_and_another_process_are_refused_with_the_fix(pair: tuple[str, str, str]) -> None:
    with pytest.raises(CheckpointConfigError, match="Use checkpoint/caller=inline, or checkpoint/stager=shared_memory"):
        build_checkpointer("async_persistent", config_of(pair))
