"""ShardedTensor, as FSDP1's sharded state dicts have it: saved and loaded by its shards, here and by stock DCP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from ckpt_component import build_checkpointer

SCRIPT = Path(__file__).parent / "scripts" / "sharded_tensor.py"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_shards_come_back_also_by_stock_dcp_and_on_other_ranks(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    run_ranks(SCRIPT, "both_ways", 3, tmp_path)
    run_ranks(SCRIPT, "resharded", 2, tmp_path)
    whole = torch.arange(9 * 4, dtype=torch.float32).reshape(9, 4)
    with build_checkpointer("sync") as checkpointer:
        for name in ("ours-1", "stock"):
            found = checkpointer.load(tmp_path / name)
            assert torch.equal(found["rows"], whole) and torch.equal(found["columns"], whole + 100)
            assert torch.equal(found["blocks"], whole - 50) and found["list"][0].tolist() == [0, 1]
    stock: dict[str, Any] = {"rows": torch.zeros(9, 4), "list": [torch.zeros(2, dtype=torch.int64)]}
    dcp.load(stock, checkpoint_id=tmp_path / "ours-1")
    assert torch.equal(stock["rows"], whole) and stock["list"][0].tolist() == [0, 1]


@pytest.mark.slow
def test_where_its_parts_cannot_be_kept_it_is_refused_by_key(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "refused", 3, tmp_path)


@pytest.mark.slow
def test_a_module_under_fsdp1_comes_back(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "fsdp", 2, tmp_path)
