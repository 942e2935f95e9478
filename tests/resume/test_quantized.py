"""Layers that bitsandbytes has quantized, and modules of which only their own code knows what shapes they take."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized import Adapted, Fixed, FourBitLayer, GivesMore, Growing
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ckpt_component import Checkpointer, CheckpointLoadError, build_checkpointer, build_manager, load_weights

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(9))


def model(seed: int, *, double: bool) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(*(Adapted(FourBitLayer(8, 8, double=double)) for _ in range(2)))


def losses(made: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    found = []
    for _ in range(steps):
        loss = (made(X) - X).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def adam(made: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in made.parameters() if each.requires_grad], lr=1e-2)


@pytest.fixture
def ours() -> Any:
    with build_checkpointer("sync", ["checkpoint.load.prove=on_read"]) as checkpointer:
        yield checkpointer


@pytest.mark.parametrize("double", [False, True])
def test_a_run_resumes_whatever_base_it_was_built_with(double: bool, tmp_path: Path) -> None:
    made = model(0, double=double)
    optimizer = adam(made)
    losses(made, optimizer)
    with build_manager("sync", dir=tmp_path) as manager:
        manager.save(3, {"model": made, "optimizer": optimizer})
    expected, expected_output = losses(made, optimizer), made(X)
    resumed = model(1, double=double)
    parts = {id(part) for part in resumed.parameters()}
    optimizer = adam(resumed)
    with build_manager("sync", dir=tmp_path) as manager:
        assert manager.restore({"model": resumed, "optimizer": optimizer}) == 3
    assert losses(resumed, optimizer) == expected
    assert torch.equal(resumed(X), expected_output)
    assert {id(part) for part in resumed.parameters()} == parts


def test_weights_are_loaded_into_quantized_layers(tmp_path: Path, ours: Checkpointer) -> None:
    made = model(0, double=True)
    ours.save({"model": made}, tmp_path / "saved")
    for load in (
        lambda other: load_weights(other, tmp_path / "saved"),
        lambda other: ours.load(tmp_path / "saved", {"model": other}),
        lambda other: ours.load(tmp_path / "saved", {"model": torch.compile(other, backend="eager")}),
        lambda other: ours.load(tmp_path / "saved", {"model": checkpoint_wrapper(other)}),
        lambda other: ours.load(tmp_path / "saved", other, rename={"model": ""}),
    ):
        other = model(1, double=True)
        assert not torch.equal(other(X), made(X))
        load(other)
        assert torch.equal(other(X), made(X))


def test_another_quantization_is_refused_before_anything_is_loaded(tmp_path: Path, ours: Checkpointer) -> None:
    made = model(0, double=True)
    ours.save({"model": made}, tmp_path / "double")
    other = model(1, double=True)
    other[1].base.weight.quant_state.described = lambda: {"quant_type": "nf4", "blocksize": 128, "nested_offset": 0.5}
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointLoadError, match=r"'model.1.base.weight' has blocksize 128 in the target and 64 in"):
        ours.load(tmp_path / "double", {"model": other})
    assert all(map(torch.equal, before.values(), other.state_dict().values()))
    plain = nn.Sequential(*(Adapted(nn.Linear(8, 8, bias=False)) for _ in range(2)))
    with pytest.raises(CheckpointLoadError, match="is quantized in the checkpoint .* and not in the target"):
        ours.load(tmp_path / "double", {"model": plain})
    ours.save({"model": plain}, tmp_path / "plain")
    with pytest.raises(CheckpointLoadError, match="is quantized in the target .* and not in the checkpoint"):
        ours.load(tmp_path / "plain", {"model": model(1, double=True)})


def test_a_module_takes_other_shapes_by_its_own_code(tmp_path: Path, ours: Checkpointer) -> None:
    grown = Growing()
    grown.add(5)
    ours.save({"model": nn.ModuleList([nn.Linear(2, 2), grown])}, tmp_path / "saved")
    other: Any = nn.ModuleList([nn.Linear(2, 2), Growing()])
    ours.load(tmp_path / "saved", {"model": other})
    assert torch.equal(other[1].seen, grown.seen)


def test_a_shape_that_the_module_refuses_is_refused_before_anything_is_loaded(
    tmp_path: Path, ours: Checkpointer
) -> None:
    ours.save({"model": nn.ModuleList([nn.Linear(2, 2), Fixed(4)])}, tmp_path / "saved")
    other: Any = nn.ModuleList([nn.Linear(2, 2), Fixed(7)])
    before = other[0].weight.detach().clone()
    with pytest.raises(
        CheckpointLoadError, match=r"'model.1.table' has shape \(4, 3\) in the checkpoint .*Fixed: size"
    ):
        ours.load(tmp_path / "saved", {"model": other})
    assert torch.equal(other[0].weight, before)


def test_the_first_save_warns_of_a_module_that_refuses_what_it_gives(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grown = Growing()
    state: dict[str, Any] = {"model": nn.ModuleList([FourBitLayer(4, 4, double=True), grown, GivesMore()])}
    before = {name: value.clone() for name, value in state["model"].state_dict().items()}
    with caplog.at_level(logging.WARNING), build_manager("sync", dir=tmp_path) as manager:
        manager.save(1, state)
        grown.add(2)  # another structure
        manager.save(2, state)
    (warning,) = [each.getMessage() for each in caplog.records if "no load can restore" in each.getMessage()]
    assert warning.startswith("no load can restore 'model.2'") and "norm" in warning
    grown.seen = grown.seen[:0]
    assert all(map(torch.equal, before.values(), state["model"].state_dict().values()))
