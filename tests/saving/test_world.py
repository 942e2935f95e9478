"""Managers built for other ranks than there are, and tensors of which the ranks do not hold all: nothing is committed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from strides import in_turn

from ckpt_component import build_checkpointer

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "scripts" / "world.py"


@pytest.mark.parametrize(
    "function",
    in_turn(
        [
            "manager_before_the_group",
            "one_rank_before_the_group",
            "group_made_again",
            "group_gone_before_close",
            "alone_with_parts",
            "other_shapes",
        ],
        2,
    ),
)
def test_ranks_that_are_not_those_of_the_manager(function: str, tmp_path: Path) -> None:
    run_ranks(SCRIPT, function, 3, tmp_path)


def test_one_rank_stays_one_with_a_group(tmp_path: Path) -> None:
    run_ranks(SCRIPT, "group_of_one", 1, tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tensors_of_some_of_the_ranks_are_whole_or_refused(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    run_ranks(SCRIPT, "mesh_of_a_subgroup", 3, tmp_path)
    whole = torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5)
    with build_checkpointer("sync") as checkpointer:
        found = checkpointer.load(tmp_path / "good")
    assert torch.equal(found["rows"], whole) and torch.equal(found["model"]["weight"], whole)
    assert torch.equal(found["same"], whole) and found["scalar"] == 2.5
    stock = {"rows": torch.zeros(7, 5), "scalar": torch.tensor(0.0)}
    dcp.load(stock, checkpoint_id=tmp_path / "good")
    assert torch.equal(stock["rows"], whole) and stock["scalar"] == 2.5
