"""Make the golden checkpoints of one torch version: small ones, kept for ever, that every later release must load.

    cd tests/loading/golden && python make.py torch-2.13

The folder must be new: a golden checkpoint is never made again. `test_golden.py` has the values. Of a release that changes
one kind alone (`before-checksum-names`, `short-archives`) only that is kept.
"""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp


def state(*, objects: bool = True) -> dict[str, Any]:
    """What is in every golden checkpoint; never changed."""
    tensors: dict[str, Any] = {
        "float": torch.arange(6, dtype=torch.float32).view(2, 3) / 7,
        "half": torch.arange(4, dtype=torch.float16) / 3,
        "brain": torch.arange(5, dtype=torch.bfloat16) / 3,
        "eight": torch.arange(4, dtype=torch.float32).to(torch.float8_e4m3fn),
        "whole": torch.tensor([-(2**62), 2**62]),
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "none": torch.empty(0, 3),
        "nested": {"list": [torch.ones(2, dtype=torch.int8), torch.zeros(1, dtype=torch.uint8)]},
    }
    if not objects:
        return tensors
    plain = {"step": 12, "text": "ä", "flag": True, "nothing": None, "pair": (1, 2.5), "numbers": [1, 2, 3]}
    return {**tensors, **plain, "ordered": OrderedDict(b=1, a=2), "bytes": b"\x00\xff"}


def main(folder: str) -> None:
    """Write all kinds."""
    from safetensors.torch import save_file

    from ckpt_component import build_checkpointer

    root = Path(folder)  # relative, because stock DCP notes it in the checkpoint
    root.mkdir()
    for writer in ("dcp", "torch_save", "safetensors"):
        overrides = [f"checkpoint/writer={writer}", "checkpoint.writer.workers=1"]
        with build_checkpointer("sync", overrides) as checkpointer:
            checkpointer.save(state(objects=writer != "safetensors"), root / writer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state(), checkpoint_id=root / "stock_dcp")
    torch.save(state(), root / "stock.pt")
    # The form of before torch 1.6, in which torch cannot load float8.
    older = {key: value for key, value in state().items() if key != "eight"}
    torch.save(older, root / "legacy.pt", _use_new_zipfile_serialization=False)
    flat = {key: value for key, value in state(objects=False).items() if key != "nested"}
    save_file(flat, root / "stock.safetensors")


if __name__ == "__main__":
    main(sys.argv[1])
