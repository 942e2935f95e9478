"""Several ranks save and load together: shards, what they share, failures of one, and another number of ranks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from ranks import run_ranks
from strides import in_turn

from ckpt_component import build_checkpointer

pytestmark = pytest.mark.slow


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = Path(__file__).parent / "scripts" / "sharded.py"


def whole_target() -> dict[str, object]:
    whole = torch.zeros(7, 5)
    return {
        "rows": whole.clone(),
        "columns": whole.clone(),
        "few": torch.zeros(2, dtype=torch.int64),
        "alike": whole.clone(),
        "square": whole.clone(),
        "plain": {"weights": [torch.zeros(1000, dtype=torch.int16), torch.zeros(0)], "scale": torch.tensor(0.0)},
        "step": 0,
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("world_size", "other"), in_turn([(1, 4), (2, 3), (3, 4), (4, 2)], 4))
def test_shards_saved_by_some_ranks_load_on_others_and_by_stock_dcp(
    world_size: int, other: int, tmp_path: Path
) -> None:
    import torch.distributed.checkpoint as dcp

    script = load(SCRIPT, "sharded")
    run_ranks(SCRIPT, "save_sharded", world_size, tmp_path)
    run_ranks(SCRIPT, "load_sharded", other, tmp_path)
    for stager in ("shared_memory", "zero_overhead", "none"):
        target = whole_target()
        with build_checkpointer("sync") as checkpointer:
            checkpointer.load(tmp_path / stager, target, strict=True)
        script.check(target)
        stock = whole_target()
        dcp.load(stock, checkpoint_id=tmp_path / stager)
        script.check(stock)


def test_what_all_ranks_have_is_stored_once_and_shared_out(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "save_sharded", 2, tmp_path)
    files = [path for path in (tmp_path / "shared_memory").iterdir() if path.suffix == ".distcp"]
    text = (tmp_path / "shared_memory" / "integrity-0.json").read_text()
    other = (tmp_path / "shared_memory" / "integrity-1.json").read_text()
    assert ('["plain","weights",0]' in text) != ('["plain","weights",0]' in other)
    assert {path.name[2] for path in files} == {"0", "1"}


def test_stock_checkpoints_load_by_parts_and_fsdp_comes_back_also_on_one_rank(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "stock_and_fsdp", 2, tmp_path)
    module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    with build_checkpointer("sync") as checkpointer:
        checkpointer.load(tmp_path / "fsdp", {"model": module, "optimizer": optimizer}, strict=True)
        values = checkpointer.load(tmp_path / "fsdp")
    weight = module.get_parameter("2.weight")
    assert torch.equal(weight, values["model"]["2.weight"]) and optimizer.state[weight]["exp_avg"].any()


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_step_of_dtensors_overlaps_with_their_copy(world_size: int, tmp_path: Path) -> None:
    run_ranks(SCRIPT, "step_during_copies", world_size, tmp_path)


def test_values_of_a_ranks_own(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "own_values", 2, tmp_path, SAVED_BY="2")
    run_ranks(SCRIPT, "own_values", 3, tmp_path, SAVED_BY="2")


def test_a_failure_of_one_rank_is_the_same_error_on_all_and_the_next_save_works(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "failures", 2, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_shards_on_cuda_under_nccl(tmp_path: Path) -> None:
    ranks = min(2, torch.cuda.device_count())
    run_ranks(SCRIPT, "on_cuda", ranks, tmp_path, CKPT_TEST_BACKEND="nccl")


def test_the_manager_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "managed", 2, tmp_path)
