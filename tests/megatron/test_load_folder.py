"""A folder that a real megatron-core has written loads here as plain tensors, with all values equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_places import package_of
from ranks import run_ranks

from ckpt_component import build_checkpointer

SCRIPT = Path(__file__).with_name("megatron_folder.py")
QKV = "decoder.layers.self_attention.linear_qkv.weight"


@pytest.mark.turns(3)
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    package_of("") is None,
    reason="needs megatron-core (pip install --no-deps megatron-core==0.16.1)",
)
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_folder_of_megatron_core_loads(world_size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_ranks(SCRIPT, "save", world_size, tmp_path, timeout=240)

    def rows(layer: int, rank: int) -> torch.Tensor:
        return torch.arange(12.0).view(4, 3) + 100 * layer + 1000 * rank

    whole = torch.stack([torch.cat([rows(layer, rank) for rank in range(world_size)]) for layer in range(2)])
    with build_checkpointer("sync") as ours:
        for path in (tmp_path / "saved", tmp_path / "saved" / "iter_0000100"):
            loaded = ours.load(path)
            assert torch.equal(loaded.pop(QKV), whole)
            norm = loaded.pop("decoder.final_layernorm.weight")
            assert norm.dtype == torch.bfloat16 and norm.eq(2.5).all()
            for rank in range(world_size):
                state = loaded.pop(f"rng_state/shard_{rank}_{world_size}")
                assert state["rank"] == rank and state["t"].tolist() == [0, 1, 2]
            expected = {"iteration": 100, "optimizer": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.95)}]}}
            assert {key: loaded[key] for key in expected} == expected
            assert "args (argparse.Namespace)" in caplog.text and "args" not in loaded
            target: dict[str, Any] = {"model": {"qkv": torch.zeros_like(whole)}, "iteration": 0}
            ours.load(path, target, strict=True, rename={QKV: "model.qkv"})
            assert torch.equal(target["model"]["qkv"], whole) and target["iteration"] == 100
