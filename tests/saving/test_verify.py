"""`checkpoint.verify`: when the checksums of what is read are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ckpt_component import (
    CheckpointConfigError,
    CheckpointCorruptError,
    SyncCheckpointer,
    build_checkpointer,
    build_manager,
)
from ckpt_component.saving.adapters import CheckpointReader


def saved(root: Path, writer: str) -> Path:
    """A run of two steps whose newest one has a flipped bit in the middle of its payload; returns the damaged one."""
    with build_manager("sync", [f"checkpoint/writer={writer}", "checkpoint.save.every_steps=1"], dir=root) as manager:
        for step in (1, 2):
            manager.maybe_save(step, {"weight": torch.full((4000,), float(step))})
    folder = root / "iter_0000002"
    path = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)
    return folder


@pytest.mark.parametrize("writer", ["dcp", "torch_save", "safetensors"])
@pytest.mark.parametrize(
    ("verify", "load_sees", "restore_sees"), [("on_read", 1, 1), ("on_resume", 0, 1), ("off", 0, 0)]
)
def test_when_checksums_are_compared(
    verify: str, load_sees: bool, restore_sees: bool, writer: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path, writer)

    def target() -> dict[str, Any]:
        return {"weight": torch.zeros(4000)}

    with build_checkpointer("sync", [f"checkpoint.verify={verify}"]) as ours:
        for state in (None, target()):
            if load_sees:
                with pytest.raises(CheckpointCorruptError, match="does not match|do not match"):
                    ours.load(folder, state)
            else:
                assert ours.load(folder, state)["weight"].ne(2).sum() == 1
    with build_manager("sync", [f"checkpoint.verify={verify}"], dir=tmp_path) as manager:
        assert manager.restore(target()) == (1 if restore_sees else 2)


@pytest.mark.parametrize("verify", ["on_read", "on_resume", "off"])
@pytest.mark.parametrize("writer", ["dcp", "torch_save", "safetensors"])
def test_sizes_and_structure_are_always_checked(verify: str, writer: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, writer)
    with build_checkpointer("sync", [f"checkpoint.verify={verify}"]) as ours:
        for name in (
            "manifest.json",
            "integrity-0.json",
            max(folder.iterdir(), key=lambda path: path.stat().st_size).name,
        ):
            whole = (folder / name).read_bytes()
            (folder / name).write_bytes(whole[:-3])
            with pytest.raises(CheckpointCorruptError, match=name):
                ours.load(folder)
            (folder / name).write_bytes(whole)


def test_a_word_that_is_none_of_the_three() -> None:
    with pytest.raises(CheckpointConfigError, match="verify"):
        build_checkpointer("sync", ["checkpoint.verify=sometimes"])


def test_a_reader_of_somebody_elses_gets_what_it_knows() -> None:
    class Theirs:
        def read(self, path: str, state_dict: Any = None, *, map_location: Any = None, **more: Any) -> Any:
            assert not more
            return {"path": path}, []

    class Nothing:
        def write(self, state_dict: Any, path: str) -> None: ...

        def close(self) -> None: ...

    ours = SyncCheckpointer(Nothing(), cast(CheckpointReader, Theirs()))
    assert ours.load("x", {}, strict=True) == {"path": "x"}
    ours.close()


def test_a_resuming_run_is_told_of_keys_that_it_has_no_place_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with build_manager("sync", dir=tmp_path) as manager:
        manager.save(1, {"kept": torch.ones(1), "dropped": {"a": torch.ones(1), "b": 2}})
    with build_manager("sync", dir=tmp_path) as manager:
        assert manager.restore({"kept": torch.zeros(1)}) == 1
    told = [record for record in caplog.records if "dropped.a, dropped.b" in record.message]
    assert [record.levelname for record in told] == ["WARNING"]
