"""Accelerate with `save_in_background`: the files and the losses are those of Accelerate alone."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("accelerate", reason="needs accelerate: pip install '.[accelerate]'")

from accelerate import Accelerator
from safetensors.torch import load_file

import ckpt_component
from ckpt_component import CheckpointConfigError, CheckpointCorruptError, CheckpointExistsError, CheckpointTypeError
from ckpt_component.integrations.accelerate import save_in_background

SCRIPT = Path(__file__).parent / "scripts" / "train_accelerate.py"
PAGE = Path(ckpt_component.__file__).parents[1] / "docs" / "huggingface.md"
OURS = {"manifest.json", "integrity-0.json"}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:(torch|accelerate)")


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_accelerate", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


train = _script().train


def test_losses_and_files_are_those_of_accelerate_alone(tmp_path: Path) -> None:
    losses, weight = train(tmp_path / "alone", None)
    ours = train(tmp_path / "ours", [])
    assert ours[0] == losses and torch.equal(ours[1], weight)
    for number in range(3):
        folders = [tmp_path / name / "checkpoints" / f"checkpoint_{number}" for name in ("ours", "alone")]
        assert set(os.listdir(folders[0])) == {*os.listdir(folders[1]), *OURS}
        assert "custom_checkpoint_0.pkl" in os.listdir(folders[0])
        weights = [load_file(folder / "model.safetensors") for folder in folders]
        assert weights[0].keys() == weights[1].keys()
        assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    # Each loads what the other saved.
    longer = train(tmp_path / "alone", None, epochs=4, resume=True)
    assert longer[0] == train(tmp_path / "ours", None, epochs=4, resume=True)[0]
    assert len(longer[0]) == 12 and longer[0][:9] == losses


@pytest.mark.parametrize(("whom", "last"), [("trainer", 1), pytest.param("all", 0, marks=pytest.mark.slow)])
def test_a_run_killed_in_a_save_resumes_as_if_nothing_had_happened(tmp_path: Path, whom: str, last: int) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path / "killed"), f"kill={whom}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == -signal.SIGKILL and "in the save" in done.stdout, done.stderr[-2000:]
    resumed = train(tmp_path / "killed", [], resume=True)
    losses, weight = train(tmp_path / "alone", None)
    assert resumed[0] == losses and torch.equal(resumed[1], weight)
    names = {name for name in os.listdir(tmp_path / "killed" / "checkpoints") if not name.startswith(".")}
    assert names == {"checkpoint_0", "checkpoint_1", "checkpoint_2"}


def test_the_limit_holds_and_damage_is_found(tmp_path: Path) -> None:
    train(tmp_path, [], limit=2)
    folder = tmp_path / "checkpoints"
    assert sorted(os.listdir(folder)) == ["checkpoint_1", "checkpoint_2"]
    with open(folder / "checkpoint_2" / "optimizer.bin", "r+b") as file:
        file.seek(5000)
        file.write(b"damage")
    accelerator = Accelerator(cpu=True)
    save_in_background(accelerator)
    with pytest.raises(CheckpointCorruptError, match=r"optimizer\.bin"):
        accelerator.load_state(folder / "checkpoint_2")
    with pytest.raises(CheckpointExistsError, match="checkpoint_1 already exists"):
        accelerator.save_state(folder / "checkpoint_1")
    with pytest.raises(CheckpointConfigError, match="Name the folder"):
        accelerator.save_state()
    accelerator.end_training()
    # The next run sets the damaged one aside, and trains its epoch again.
    assert train(tmp_path, [], limit=2, resume=True)[0] == train(tmp_path / "alone", None)[0]
    names = os.listdir(folder)
    assert {name for name in names if not name.startswith(".")} == {"checkpoint_1", "checkpoint_2"}
    assert [name for name in names if name.startswith(".ckpt-quarantine.checkpoint_2.")]


def test_the_script_of_the_page_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (script,) = re.findall(
        r"```python notest: tests/integrations/test_accelerate[^\n]*\n(.*?)```", PAGE.read_text(), re.DOTALL
    )
    script = script.replace("Accelerator(project", "Accelerator(cpu=True, project")
    script = script.replace("1600", "160")
    for epochs in (2, 4):
        Path("train.py").write_text(script.replace(", 20)", f", {epochs})"))
        weight = runpy.run_path("train.py")["model"][0].weight
        assert sorted(os.listdir("run/checkpoints")) == [
            f"checkpoint_{number}" for number in range(max(epochs - 3, 0), epochs)
        ]
    Path("whole").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    assert torch.equal(runpy.run_path(str(tmp_path / "train.py"))["model"][0].weight, weight)


def test_wrong_uses_are_refused_at_once() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(CheckpointTypeError, match="takes an Accelerator, got a str"):
        save_in_background("async_persistent")
    with pytest.raises(CheckpointConfigError, match="async_persistent"):
        save_in_background(accelerator, "async_persistant")
    with pytest.raises(CheckpointConfigError, match="use ProjectConfiguration.total_limit"):
        save_in_background(accelerator, overrides=["checkpoint.keep.last=3"])
    assert save_in_background(accelerator, "off") is None and "save_state" not in vars(accelerator)
    save_in_background(accelerator)
    with pytest.raises(CheckpointConfigError, match="already"):
        save_in_background(accelerator)
    accelerator.end_training()
