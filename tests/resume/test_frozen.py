"""`checkpoint.save.frozen=skip`: frozen parameters are not stored, and the next run must have the same ones."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized import Adapted, FourBitLayer
from ranks import run_ranks
from safetensors.torch import load_file
from torch import nn

from ckpt_component import (
    CheckpointConfigError,
    CheckpointLoadError,
    CheckpointManager,
    build_checkpointer,
    build_manager,
    load_weights,
)
from ckpt_component.core.storage.files import FileStorage
from ckpt_component.core.storage.locate import storage_at
from ckpt_component.exporting.export import ExportOptions, export_checkpoint
from ckpt_component.formats.opening import open_index
from ckpt_component.publishing import follow
from ckpt_component.state import frozen_weights
from ckpt_component.state.digests import digest_of_part
from ckpt_component.state.paths import FROZEN

RANKS = Path(__file__).parent / "scripts" / "frozen_worlds.py"
WIDTH = 256
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(9))


def base(kind: str) -> nn.Module:
    return nn.Linear(WIDTH, WIDTH) if kind == "plain" else FourBitLayer(WIDTH, WIDTH, double=True)


def model(seed: int, kind: str = "plain") -> Any:
    torch.manual_seed(seed)
    made: Any = nn.Sequential(*(Adapted(base(kind), WIDTH) for _ in range(3)))
    torch.manual_seed(7)
    for layer in made:
        nn.init.normal_(layer.down.weight)
    return made


def adam(made: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in made.parameters() if each.requires_grad], lr=1e-2)


def losses(made: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    found = []
    for _ in range(steps):
        loss = (made(X) - X).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def manager_in(folder: Path, *overrides: str, preset: str = "sync") -> CheckpointManager:
    return build_manager(preset, ["checkpoint.save.frozen=skip", *overrides], dir=folder)


def keys_of(folder: Path) -> set[str]:
    return {*open_index(storage_at(str(folder)), str(folder)).entries}


def nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def damage_last_byte(path: Path) -> None:
    """Damage the last tensor of a file: before it, others are read."""
    data = bytearray(path.read_bytes())
    data[-2000] ^= 1
    path.write_bytes(data)


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, list[float]]:
    """A run that was killed at step 3, and the losses that follow."""
    made = model(0)
    optimizer = adam(made)
    losses(made, optimizer)
    with manager_in(tmp_path / "run") as manager:
        manager.save(3, {"model": made, "optimizer": optimizer})
    return tmp_path / "run", losses(made, optimizer)


@pytest.mark.parametrize("kind", ["plain", "quantized"])
@pytest.mark.parametrize("writer", ["dcp", "torch_save"])
def test_a_run_resumes_on_the_same_base_without_its_bytes(kind: str, writer: str, tmp_path: Path) -> None:
    made = model(0, kind)
    optimizer = adam(made)
    losses(made, optimizer)
    state = {"model": made, "optimizer": optimizer}
    writer = f"checkpoint/writer={writer}"
    with (
        manager_in(tmp_path / "skip", writer) as manager,
        build_manager("sync", [writer], dir=tmp_path / "keep") as keeps,
    ):
        manager.save(3, state)
        keeps.save(3, state)
    stored = keys_of(tmp_path / "skip/iter_0000003")
    names = {key.removeprefix("model.") for key in stored if key.startswith("model.")}
    adapters = {name for name, each in made.named_parameters() if each.requires_grad}
    assert names == {*adapters, FROZEN}
    assert {f"optimizer.state.{number}.exp_avg" for number in range(len(adapters))} <= stored
    base_bytes = sum(each.nbytes for each in made.parameters() if not each.requires_grad)
    assert nbytes(tmp_path / "keep") - nbytes(tmp_path / "skip") > base_bytes
    assert base_bytes > sum(size for size in map(os.path.getsize, (tmp_path / "skip").rglob("*.distcp")))
    expected = losses(made, optimizer)
    made = model(0, kind)
    optimizer = adam(made)
    with manager_in(tmp_path / "skip", writer) as manager:
        assert manager.restore({"model": made, "optimizer": optimizer}) == 3
        assert losses(made, optimizer) == expected
        manager.save(6, {"model": made, "optimizer": optimizer})
    assert keys_of(tmp_path / "skip/iter_0000006") == stored


@pytest.mark.parametrize("kind", ["plain", "quantized"])
def test_another_base_is_refused_by_name_and_nothing_is_loaded(kind: str, tmp_path: Path) -> None:
    made = model(0, kind)
    with manager_in(tmp_path) as manager:
        manager.save(3, {"model": made})
    other = model(0, kind)
    changed = other[1].base.weight
    if kind == "plain":
        with torch.no_grad():
            changed[5, 7] += 1e-6
    else:
        changed.quant_state.offset.mul_(1.001)
    with torch.no_grad():
        other[0].up.weight.fill_(3)
    part = "" if kind == "plain" else r"\.quant_state\.bitsandbytes__nf4"
    text = rf"the base model is another one: 1 of \d+ frozen tensors differ, first 'model\.1\.base\.weight{part}'"
    for preset in ("sync", "async_persistent"):
        with build_manager(preset, dir=tmp_path) as manager, pytest.raises(CheckpointLoadError, match=text):
            manager.restore({"model": other})
    assert bool((other[0].up.weight == 3).all())


def test_a_base_of_another_shape_or_without_a_part_is_another_one(run: tuple[Path, list[float]]) -> None:
    smaller = model(0)
    smaller[2].base = nn.Linear(WIDTH, WIDTH, bias=False)
    with (
        build_manager("sync", dir=run[0]) as manager,
        pytest.raises(CheckpointLoadError, match=r"2 of 6 .*2\.base\.bias"),
    ):
        manager.restore({"model": smaller})
    half = model(0)
    half[1].base.half()
    with build_manager("sync", dir=run[0]) as manager, pytest.raises(CheckpointLoadError, match=r"2 of 6 frozen"):
        manager.restore({"model": half})


def test_it_loads_without_the_key_and_into_what_is_not_frozen_any_more(run: tuple[Path, list[float]]) -> None:
    made = model(0).requires_grad_(True)
    with build_manager("sync", dir=run[0]) as manager:
        assert manager.restore({"model": made}) == 3
    made = model(0)
    optimizer = adam(made)
    with build_manager("sync", dir=run[0]) as manager:
        manager.restore({"model": made, "optimizer": optimizer})
        assert losses(made, optimizer) == run[1]
        manager.save(6, {"model": made})
    assert "model.0.base.weight" in keys_of(run[0] / "iter_0000006")


def test_a_run_that_kept_its_base_can_leave_it_out(tmp_path: Path) -> None:
    made = model(0)
    with build_manager("sync", dir=tmp_path) as manager:
        manager.save(1, {"model": made})
    made = model(0)
    with manager_in(tmp_path) as manager:
        manager.restore({"model": made})
        manager.save(2, {"model": made})
    assert "model.0.base.weight" not in keys_of(tmp_path / "iter_0000002")


@pytest.mark.parametrize("preset", ["sync", "async_persistent"])
def test_values_that_the_script_does_not_make_stay_in_the_checkpoint(
    preset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Trained and then frozen, and restored and then frozen: another start of the script would not have these."""
    made = model(0)
    made[0].base.weight.requires_grad_(True)
    with manager_in(tmp_path, preset=preset) as manager:
        manager.restore({"model": made})
        manager.save(1, {"model": made})
        with torch.no_grad():
            made[0].base.weight += 1
        made[0].base.weight.requires_grad_(False)
        manager.save(2, {"model": made})
    trained = made[0].base.weight.detach().clone()
    for step in (3, 4):
        made = model(0)
        with caplog.at_level(logging.WARNING), manager_in(tmp_path, preset=preset) as manager:
            assert manager.restore({"model": made}) == step - 1
            assert torch.equal(made[0].base.weight, trained)
            manager.save(step, {"model": made})
    assert "1 frozen parameters are stored" in caplog.text and "model.0.base.weight" in caplog.text
    stored = keys_of(tmp_path / "iter_0000004")
    assert "model.0.base.weight" in stored and "model.1.base.weight" not in stored


def test_a_damaged_checkpoint_before_does_not_make_its_values_those_of_the_script(tmp_path: Path) -> None:
    """The load that failed has filled some of the base, which the next start of the script does not make."""
    with build_manager("sync", ["checkpoint.reuse.mode=off"], dir=tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"model": model(5)})
    for path in (tmp_path / "iter_0000002").glob("*.distcp"):
        damage_last_byte(path)
    made = model(0)
    with manager_in(tmp_path) as manager:
        assert manager.restore({"model": made}) == 1
        manager.save(3, {"model": made})
    assert {key for key in keys_of(tmp_path / "iter_0000003") if ".base." in key} == {
        f"model.{name}" for name, _ in made.named_parameters() if ".base." in name
    }


def test_a_module_that_joins_later_is_left_out_too(tmp_path: Path) -> None:
    made, other = model(0), model(1)
    with manager_in(tmp_path) as manager:
        manager.save(1, {"model": made})
        manager.save(2, {"model": made, "other": other})
    assert [key for key in keys_of(tmp_path / "iter_0000002") if ".base." in key] == []


def test_what_changes_during_the_run_is_stored(tmp_path: Path) -> None:
    made = model(0)
    with manager_in(tmp_path) as manager:
        manager.save(1, {"model": made})
        with torch.no_grad():
            made[1].base.weight.add_(0)  # another version, and the same values
            made[2].base.bias[3] += 1
        manager.save(2, {"model": made})
        made[0].base.weight.requires_grad_(True)
        manager.save(3, {"model": made})
    names = [{key for key in keys_of(tmp_path / f"iter_{step:07d}") if ".base." in key} for step in (1, 2, 3)]
    assert names == [set(), {"model.2.base.bias"}, {"model.2.base.bias", "model.0.base.weight"}]


def test_digests_are_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.Tensor] = []

    def take(tensor: torch.Tensor, shard: Any) -> int:
        taken.append(tensor)
        return digest_of_part(tensor, shard)

    monkeypatch.setattr(frozen_weights, "digest_of_part", take)
    made = model(0)
    with manager_in(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"model": made})
    assert len(taken) == 6
    made = model(0)
    with manager_in(tmp_path) as manager:
        manager.restore({"model": made})
        manager.save(4, {"model": made})
    assert len(taken) == 12


def test_a_state_without_modules_is_stored_whole_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = model(0)
    with caplog.at_level(logging.WARNING), manager_in(tmp_path) as manager:
        manager.save(1, {"model": made.state_dict()})
    assert "leaves nothing out" in caplog.text
    assert {f"model.{name}" for name in made.state_dict()} <= keys_of(tmp_path / "iter_0000001")


def test_weights_alone_need_the_base_too(run: tuple[Path, list[float]], caplog: pytest.LogCaptureFixture) -> None:
    made = model(0)
    assert load_weights(made, run[0]) == 3
    other = model(1)
    with pytest.raises(CheckpointLoadError, match="the base model is another one: 6 of 6 frozen tensors differ"):
        load_weights(other, run[0])
    names = [name for name, each in other.named_parameters() if not each.requires_grad]
    load_weights(other, run[0], ignore=[f"model.{name}" for name in names])
    assert torch.equal(other[0].up.weight, made[0].up.weight)
    with build_checkpointer("sync") as checkpointer, caplog.at_level(logging.WARNING):
        found = checkpointer.load(run[0])
        assert "does not have 6 frozen tensors" in caplog.text
        assert found["model"].keys() == {name for name in made.state_dict() if ".base." not in name}
        into: dict[str, Any] = {"model": {"0.up.weight": torch.zeros(WIDTH, 2)}}
        checkpointer.load(run[0], into)
    assert torch.equal(into["model"]["0.up.weight"], made[0].up.weight)


def test_exports_say_what_they_lack(
    run: tuple[Path, list[float]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = str(run[0] / "iter_0000003"), str(tmp_path / "adapter.safetensors")
    with pytest.raises(CheckpointLoadError, match="does not have the frozen parameters.* from_pretrained"):
        export_checkpoint(source, str(tmp_path / "hf"), ExportOptions("hf"), FileStorage())
    with caplog.at_level(logging.WARNING):
        export_checkpoint(source, target, ExportOptions("safetensors", "model"), FileStorage())
    assert "does not have the frozen parameters" in caplog.text and "left out: " not in caplog.text
    exported = load_file(target)
    assert exported.keys() == {name for name, each in model(0).named_parameters() if each.requires_grad}
    export_checkpoint(source, str(tmp_path / "all.pt"), ExportOptions("torch"), FileStorage())
    assert FROZEN not in torch.load(tmp_path / "all.pt")["model"]


@pytest.mark.slow
def test_published_versions_have_the_others_and_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made, to = model(0), tmp_path / "weights"
    overrides = [f"checkpoint.publish.to={to}", "checkpoint.publish.delta=off"]
    with caplog.at_level(logging.WARNING), manager_in(tmp_path / "run", *overrides) as manager:
        manager.save(1, {"model": made})
    assert "versions have no frozen parameters" in caplog.text
    newest = follow(to, timeout=60)
    try:
        names = {name for name, _ in next(newest).tensors()}
    finally:
        newest.close()
    assert names == {name for name, each in made.named_parameters() if each.requires_grad}


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("checkpoint/writer=safetensors", "frozen=skip stores digests .* have tensors only"),
        ("checkpoint.export.format=hf", "format=hf is for whole models"),
    ],
)
def test_what_cannot_be_without_them_is_refused(override: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointConfigError, match=text):
        manager_in(tmp_path, override)


@pytest.mark.parametrize("world_sizes", [(3,), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_ranks_compare_a_base_that_is_sharded_in_another_way(world_sizes: tuple[int, ...], tmp_path: Path) -> None:
    run_ranks(RANKS, "save", 2, tmp_path)
    for kind in ("ddp", "fsdp2"):
        stored = keys_of(tmp_path / kind / "iter_0000003")
        assert [key for key in stored if ".base." in key] == []
        assert len([key for key in stored if FROZEN in key]) == (1 if kind == "ddp" else 2)
    for world_size in world_sizes:
        said = run_ranks(RANKS, "resume", world_size, tmp_path)
        text = "the base model is another one: 1 of 6 frozen tensors differ, first 'model.1.base.weight'"
        assert [each.count(text) for each in said] == [2 if world_size == 1 else 4] * world_size, said
