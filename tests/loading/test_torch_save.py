"""Our files of torch_save: read once, whatever the tensors share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_component import SyncCheckpointer, build_checkpointer


@pytest.fixture
def ours() -> Any:
    with build_checkpointer("sync", ["checkpoint/writer=torch_save", "checkpoint.durability=process_crash"]) as made:
        yield made


def bytes_read() -> int:
    """What this process has asked the kernel to read."""
    (line,) = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar:")]
    return int(line.split()[1])


@pytest.mark.slow
@pytest.mark.parametrize("into", ["a new dict", "a target", "a target of another dtype"])
def test_a_verified_load_reads_the_file_once(into: str, ours: SyncCheckpointer, tmp_path: Path) -> None:
    state: dict[str, Any] = {"large": torch.rand(1 << 21), "small": [torch.rand(100) for _ in range(50)], "step": 3}
    ours.save(state, tmp_path / "one")
    target: dict[str, Any] | None = None
    if into != "a new dict":
        dtype = torch.float32 if into == "a target" else torch.float64
        target = {"large": torch.zeros(1 << 21, dtype=dtype), "small": [torch.zeros(100) for _ in range(50)], "step": 0}
    before = bytes_read()
    loaded = ours.load(tmp_path / "one", target, allow_dtype_cast=True)
    read, size = bytes_read() - before, (tmp_path / "one" / "checkpoint_0.pt").stat().st_size
    assert size <= read < 1.2 * size
    assert torch.equal(loaded["large"].float(), state["large"]) and torch.equal(loaded["small"][7], state["small"][7])


def shared() -> dict[str, Any]:
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "base": base,
        "row": base[1],
        "turned": base.t(),
        "tied": base,
        "strided": base[:, ::2],
        "none": torch.empty(0, 3),
        "inside": {"pair": (torch.ones(2), "text"), "list": [torch.zeros(3), 5]},
    }


def test_what_tensors_share_is_shared_after_a_load(ours: SyncCheckpointer, tmp_path: Path) -> None:
    ours.save(shared(), tmp_path / "one")
    loaded = ours.load(tmp_path / "one")
    loaded["base"][1, 0] = 99
    assert loaded["row"][0] == loaded["turned"][0, 1] == loaded["tied"][1, 0] == 99


@pytest.mark.parametrize("alone", [None, "row", "turned", "strided", "inside"])
def test_views_of_one_storage_fill_any_target(alone: str | None, ours: SyncCheckpointer, tmp_path: Path) -> None:
    ours.save(shared(), tmp_path / "one")
    wanted = {key: value for key, value in shared().items() if alone in (None, key)}
    target: dict[str, Any] = {key: torch.zeros(value.shape) for key, value in wanted.items() if key != "inside"}
    if "inside" in wanted:
        target["inside"] = {"pair": None, "list": [torch.ones(3), 0]}
    loaded = ours.load(tmp_path / "one", target)
    for key, value in wanted.items():
        if key == "inside":
            assert torch.equal(loaded[key]["pair"][0], torch.ones(2)) and loaded[key]["list"][1] == 5
        else:
            assert torch.equal(loaded[key], value)
