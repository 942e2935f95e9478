"""Fixtures of the tests of `ckpt`."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ckpt_component import build_manager
from ckpt_component.cli.app import main


class Ran(NamedTuple):
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.out, self.err
        return json.loads(self.out)


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text as wide as it gets, whatever terminal the tests run in."""
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def ckpt(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Ran]]:
    """Runs a command in this process."""

    def run(*arguments: object) -> Ran:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return Ran(int(left.value.code or 0), printed.out, printed.err)

    handler, root = signal.getsignal(signal.SIGTERM), logging.getLogger()
    handlers, level = [*root.handlers], root.level
    yield run
    signal.signal(signal.SIGTERM, handler)
    root.handlers[:] = handlers
    root.setLevel(level)


def model_state(step: int) -> dict[str, Any]:
    """A state with layers of equal shapes, of which the first changes from step to step."""
    layers = {str(number): {"weight": torch.full((8, 4), 1.0 + number), "bias": torch.zeros(8)} for number in range(4)}
    layers["0"]["bias"] += step
    return {"model": {"layers": layers, "head": torch.ones(4, dtype=torch.bfloat16)}, "epoch": step // 100, "lr": 0.1}


@pytest.fixture(scope="session")
def saved_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of steps 100 to 400 with the metric val_loss, of which 200 is the best. Copy it."""
    root = tmp_path_factory.mktemp("saved") / "checkpoints"
    overrides = ["checkpoint.keep.last=null", "checkpoint.keep.best.metric=val_loss"]
    with build_manager("sync", dir=root, overrides=overrides) as manager:
        for step in (100, 200, 300, 400):
            manager.save(step, model_state(step), metrics={"val_loss": abs(step - 200) / 100})
    return root


@pytest.fixture
def root(saved_root: Path, tmp_path: Path) -> Path:
    """A copy of `saved_root` to change."""
    return Path(shutil.copytree(saved_root, tmp_path / "checkpoints"))


@pytest.fixture(scope="session")
def saved_sharing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of steps 1 to 4 that share the file of a base of 1 MB. Copy it."""
    root = tmp_path_factory.mktemp("sharing") / "run"
    state = {"base": torch.randn(1 << 18), "adapter": torch.zeros(9000)}
    overrides = ["checkpoint.save.at_end=false", "checkpoint.keep.last=null", "checkpoint.reuse.frozen=[base]"]
    with build_manager("sync", overrides, dir=root) as manager:
        for step in range(1, 5):
            state["adapter"] += 1
            manager.save(step, state)
    return root


@pytest.fixture
def sharing(saved_sharing: Path, tmp_path: Path) -> Path:
    """A copy of `saved_sharing` to change, whose checkpoints share files as well."""
    subprocess.run(["cp", "-a", saved_sharing, tmp_path / "run"], check=True, timeout=20)
    return tmp_path / "run"
