"""`load_weights`: the weights of a model from checkpoints of any format, and nothing else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from safetensors.torch import save_file

from ckpt_component import (
    CheckpointConfigError,
    CheckpointCorruptError,
    CheckpointLoadError,
    CheckpointNotFoundError,
    CheckpointTypeError,
    MissingKeysError,
    UnexpectedKeysError,
    build_checkpointer,
    build_manager,
    load_weights,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def net(value: float = 0.0, layers: int = 2) -> torch.nn.Sequential:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(layers)))
    for parameter in model.parameters():
        parameter.data.fill_(value)
    return model


def values_of(model: torch.nn.Module) -> set[float]:
    return {float(value) for parameter in model.parameters() for value in parameter.detach().flatten()}


def trained(value: float) -> dict[str, Any]:
    model = net(value)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "epoch": 3}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with three steps, the second the best."""
    overrides = ["checkpoint.keep.best.metric=loss", "checkpoint.keep.last=9"]
    with build_manager("sync", overrides, dir=tmp_path / "run") as manager:
        for step, loss in ((100, 3.0), (200, 1.0), (300, 2.0)):
            manager.save(step, trained(float(step)), metrics={"loss": loss})
    return tmp_path / "run"


def ours(writer: str) -> Callable[[Path], tuple[Path, dict[str, Any]]]:
    def save(folder: Path) -> tuple[Path, dict[str, Any]]:
        with build_checkpointer("sync", [f"checkpoint/writer={writer}"]) as checkpointer:
            checkpointer.save(trained(7.0) if writer != "safetensors" else {"model": net(7.0)}, folder / "one")
        return folder / "one", {}

    return save


def of_stock_dcp(folder: Path) -> tuple[Path, dict[str, Any]]:
    dcp.save({"model": net(7.0).state_dict(), "epoch": 3}, checkpoint_id=folder / "one", no_dist=True)
    return folder / "one", {}


def of_lightning(folder: Path) -> tuple[Path, dict[str, Any]]:
    weights = {f"net.{key}": value for key, value in net(7.0).state_dict().items()}
    torch.save({"state_dict": weights, "epoch": 3}, folder / "last.ckpt")
    return folder / "last.ckpt", {"key": "state_dict.net"}


def bare(folder: Path) -> tuple[Path, dict[str, Any]]:
    torch.save(net(7.0).state_dict(), folder / "weights.pt")
    return folder / "weights.pt", {"key": ""}


def of_hugging_face(folder: Path) -> tuple[Path, dict[str, Any]]:
    (folder / "hub").mkdir()
    save_file(net(7.0).state_dict(), folder / "hub" / "model.safetensors")
    return folder / "hub", {"key": ""}


SAVERS = {writer: ours(writer) for writer in ("dcp", "torch_save", "safetensors")} | {
    "stock dcp": of_stock_dcp,
    "lightning": of_lightning,
    "bare": bare,
    "hugging face": of_hugging_face,
}


@pytest.mark.parametrize("form", SAVERS)
def test_every_format_fills_a_module_and_a_dict(form: str, tmp_path: Path) -> None:
    path, options = SAVERS[form](tmp_path)
    model, tensors = net(), dict(net().state_dict())
    weight, dict_weight = model[0].weight, tensors["0.weight"]
    assert load_weights(model, path, **options) is None
    assert load_weights(tensors, path, **options) is None
    assert model[0].weight is weight and tensors["0.weight"] is dict_weight  # in place
    assert values_of(model) == {7.0} and all(tensor.eq(7).all() for tensor in tensors.values())


def test_a_folder_of_checkpoints_gives_its_newest_or_the_one_that_is_picked(run: Path) -> None:
    for path, step in ((run, 300), (f"{run}@best", 200), (f"{run}@100", 100), (run / "iter_0000200", 200)):
        model = net()
        assert load_weights(model, path) == step
        assert values_of(model) == {float(step)}
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint of step 250; the nearest is .*@200"):
        load_weights(net(), f"{run}@250")
    with pytest.raises(CheckpointConfigError, match=r"@newest"):
        load_weights(net(), f"{run}@newst")
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        load_weights(net(), run.parent / "another")


def test_nothing_is_written_and_nothing_left_running(run: Path) -> None:
    def seen() -> list[tuple[str, int, int]]:
        paths = sorted([run, *run.rglob("*")])
        return [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in paths]

    load_weights(net(), run)
    before, children, threads = seen(), psutil.Process().children(), threading.active_count()
    load_weights(net(), run)
    assert seen() == before
    assert psutil.Process().children() == children and threading.active_count() == threads


def test_a_key_that_is_not_there_names_those_that_are(run: Path, tmp_path: Path) -> None:
    for key in ("net", ""):
        with pytest.raises(CheckpointLoadError, match=r"it has model, optimizer, epoch.*pass key='model'\."):
            load_weights(net(), run, key=key)
    path, _ = of_lightning(tmp_path)
    with pytest.raises(CheckpointLoadError, match=r"nothing under key='model'.*pass key='state_dict\.net'\."):
        load_weights(net(), path, strict=False)
    path, _ = bare(tmp_path)
    with pytest.raises(CheckpointLoadError, match=r"it has 0\.weight, 0\.bias, 1\.weight.*pass key=''\."):
        load_weights(net(), path)
    torch.save({"model": net().state_dict(), "ema": net().state_dict()}, tmp_path / "both.pt")
    for key, guess in (("modle", "key='model'"), ("weights", "key='ema' or key='model'")):
        with pytest.raises(CheckpointLoadError, match=rf"it has model, ema\. To load its weights, pass {guess}\."):
            load_weights(net(), tmp_path / "both.pt", key=key)
    with pytest.raises(CheckpointLoadError, match=r"none of the model's keys under key='model'.*pass key=''\."):
        load_weights({"model": net().state_dict()}, run)
    with pytest.raises(MissingKeysError, match=r"Did you mean prefix='net'\?"):
        load_weights(torch.nn.ModuleDict({"net": net()}), path, key="")
    load_weights(torch.nn.ModuleDict({"net": net()}), path, key="", prefix="net")
    no_name: Any = None
    with pytest.raises(CheckpointTypeError, match="key is None; pass a name such as 'model'"):
        load_weights(net(), run, key=no_name)
    (tmp_path / "train.py").write_text("import torch\n")
    with pytest.raises(CheckpointLoadError, match=r"train\.py is not a file of torch\.save\.$"):
        load_weights(net(), tmp_path / "train.py")
    with pytest.raises(CheckpointLoadError, match="pass key= with the name of its weights"):
        load_weights(torch.nn.ModuleDict({"x": net()}), path)


def test_all_that_does_not_fit_is_refused_before_anything_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save({"model": net(7.0).state_dict()}, tmp_path / "two.pt")
    small, large = net(layers=1), net(layers=3)
    with pytest.raises(UnexpectedKeysError, match=r"1\.bias, model\.1\.weight; pass allow_unexpected=True"):
        load_weights(small, tmp_path / "two.pt")
    with pytest.raises(MissingKeysError, match=r"missing keys: \['model\.2\.bias', .*\]; strict=False"):
        load_weights(large, tmp_path / "two.pt")
    with pytest.raises(CheckpointLoadError, match=r"'model\.0\.weight' has shape \(3, 3\)"):
        load_weights(torch.nn.Sequential(torch.nn.Linear(3, 3)), tmp_path / "two.pt", strict=False)
    assert values_of(small) == values_of(large) == {0.0}
    load_weights(small, tmp_path / "two.pt", allow_unexpected=True)
    assert values_of(small) == {7.0}
    with caplog.at_level(logging.WARNING):
        load_weights(net(layers=1), tmp_path / "two.pt", strict=False)
        assert not caplog.messages
        load_weights(large, tmp_path / "two.pt", strict=False)
    assert "is missing keys: ['model.2.bias', 'model.2.weight']; these values are left" in caplog.text
    assert values_of(large[:2]) == {7.0} and values_of(large[2]) == {0.0}
    with pytest.raises(CheckpointTypeError, match="instead of a list"):
        load_weights([small], tmp_path / "two.pt")  # type: ignore[arg-type]


def test_names_and_dtypes_may_differ(run: Path) -> None:
    inside = torch.nn.ModuleDict({"body": net()})
    with pytest.raises(MissingKeysError, match=r"rename=\{'model': 'model\.body'\}"):
        load_weights(inside, run)
    load_weights(inside, run, rename={"model": "model.body"})
    assert values_of(inside) == {300.0}
    model = net()
    load_weights(model, run, ignore=["model.1"])
    assert values_of(model[0]) == {300.0} and values_of(model[1]) == {0.0}
    half = net().to(torch.bfloat16)
    load_weights(half, run, allow_dtype_cast=True)
    assert values_of(half) == {300.0}


def test_state_that_a_module_takes_itself(tmp_path: Path) -> None:
    class Counting(torch.nn.Linear):
        seen = 0

        def get_extra_state(self) -> Any:
            return {"seen": self.seen}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]

    saved, model = Counting(2, 2), Counting(2, 2)
    saved.seen = 5
    with build_checkpointer("sync") as checkpointer:
        checkpointer.save({"model": saved}, tmp_path / "one")
    load_weights(model, tmp_path / "one")
    assert model.seen == 5 and torch.equal(model.weight, saved.weight)


def test_damage_is_found_and_no_older_checkpoint_is_taken(run: Path) -> None:
    (path,) = (run / "iter_0000300").glob("__0_0.distcp")
    data = bytearray(path.read_bytes())
    at = bytes(data).index(torch.full((4,), 300.0).numpy().tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointCorruptError):
        load_weights(net(), run)
    assert (run / "iter_0000300").exists()


@pytest.mark.turns(3)
@pytest.mark.slow
@pytest.mark.parametrize("function", ["sharded", "they_agree_on_the_newest", "one_rank_alone", "one_rank_fails"])
def test_on_two_ranks(function: str, tmp_path: Path) -> None:
    run_ranks(Path(__file__).parent / "scripts" / "weights.py", function, 2, tmp_path)
