"""Trainer with `CheckpointCallback`: the files, the losses and the resumes are those of Trainer alone."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", "5.0", reason="needs transformers 5: pip install '.[transformers]'")

from safetensors.torch import load_file
from transformers import GPT2LMHeadModel, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

import ckpt_component
from ckpt_component import (
    CheckpointConfigError,
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointTypeError,
    build_checkpointer,
)
from ckpt_component.integrations.transformers import CheckpointCallback

PAGE = Path(ckpt_component.__file__).parents[1] / "docs" / "huggingface.md"
SCRIPT = Path(__file__).parent / "scripts" / "train_gpt2.py"
OURS = {"manifest.json", "integrity-0.json", "run.json"}
#: Saves of 1.6 MB take about a second.
SLOWLY = "checkpoint.writer.max_bytes_per_second=2MB,checkpoint.writer.block_bytes=64KiB"
EVALUATING = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
}

pytestmark = [
    # Trainer logs from step 1, and this model has no loss type of its own.
    pytest.mark.filterwarnings("ignore::UserWarning:(transformers|torch|accelerate)"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(transformers|torch|accelerate)"),
]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt2", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


train_gpt2 = _script()


def trained(folder: Path, *callbacks: Any, resume: bool | str = False, **arguments: Any) -> Any:
    trainer = train_gpt2.trainer_in(folder, list(callbacks), **arguments)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def result(trainer: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        json.dumps({"curve": train_gpt2.curve(trainer), "digest": train_gpt2.digest(trainer.model)})
    )
    return found


def killed(folder: Path, whom: str) -> None:
    """Train in another process, which is killed while the checkpoint of step 8 is being written."""
    command = [sys.executable, str(SCRIPT), str(folder), "callback=async_persistent", f"overrides={SLOWLY}"]
    done = subprocess.run(
        [*command, "kill=8", f"whom={whom}"], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert "in the save of step 8" in done.stdout


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder and the result of a run without the callback."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, result(trained(folder))


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return type(one) is type(other) and list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor) or hasattr(one, "dtype"):
        return type(one) is type(other) and one.dtype == other.dtype and bool((one == other).all())
    return bool(one == other)


@pytest.mark.parametrize("preset", ["async_persistent", pytest.param("async_zero_overhead", marks=pytest.mark.slow)])
def test_losses_and_files_are_those_of_trainer_alone(tmp_path: Path, alone: Any, preset: str) -> None:
    folder, expected = alone
    assert result(trained(tmp_path, CheckpointCallback(preset))) == expected
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-12")
    for step in (4, 8, 12):
        theirs, ours = folder / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}"
        assert set(os.listdir(ours)) == {*os.listdir(theirs), *OURS}
        weights = [dict(sorted(load_file(path / "model.safetensors").items())) for path in (ours, theirs)]
        assert equal(*weights)
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            loaded = [torch.load(path / name, weights_only=False) for path in (ours, theirs)]
            assert equal(*loaded), name
        states = [json.loads((path / "trainer_state.json").read_text()) for path in (ours, theirs)]
        assert states[0] == states[1]
        with build_checkpointer("sync") as checkpointer:
            assert checkpointer.verify(ours)
    assert train_gpt2.digest(GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-12")) == expected["digest"]


@pytest.mark.parametrize(("whom", "last"), [("trainer", 8), pytest.param("all", 4, marks=pytest.mark.slow)])
def test_a_run_killed_in_a_save_resumes_as_if_nothing_had_happened(
    tmp_path: Path, alone: Any, whom: str, last: int
) -> None:
    killed(tmp_path, whom)
    # Its writer process finishes the checkpoint, if it is alive: the next Trainer waits for that.
    trainer = train_gpt2.trainer_in(tmp_path, [CheckpointCallback()])
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / f"checkpoint-{last}")
    trainer.train(resume_from_checkpoint=True)
    assert result(trainer) == alone[1]
    # What was left of step 8 is deleted at the first start that is some seconds later.
    assert {".".join(name.split(".")[:3]) for name in os.listdir(tmp_path) if name.startswith(".")} <= {
        ".ckpt-owner.json",
        ".ckpt-tmp.checkpoint-8",
    }


def test_trainer_alone_resumes_ours_and_we_resume_its(tmp_path: Path, alone: Any) -> None:
    folder, expected = alone
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    shutil.copytree(folder / "checkpoint-8", ours / "checkpoint-8")
    assert result(trained(ours, CheckpointCallback(), resume=True)) == expected
    shutil.copytree(ours / "checkpoint-12", theirs / "checkpoint-12")
    longer = [result(trained(root, resume=str(root / "checkpoint-12"), steps=14)) for root in (folder, theirs)]
    assert longer[0] == longer[1] and len(longer[0]["curve"]) == 14


@pytest.mark.parametrize(("limit", "left"), [(1, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_the_best_model_and_the_limit_are_trainers(tmp_path: Path, limit: int, left: int) -> None:
    outcomes = []
    for name, callbacks in (("theirs", []), ("ours", [CheckpointCallback()])):
        # The rate makes the loss worse in the end, so that the best checkpoint is not the last.
        settings: dict[str, Any] = {
            **EVALUATING,
            "learning_rate": 3e-2,
            "every": 2,
            "steps": 8,
            "save_total_limit": limit,
        }
        trainer = trained(tmp_path / name, *callbacks, **settings)
        best = Path(trainer.state.best_model_checkpoint)
        assert best.parent == tmp_path / name and best.is_dir()
        folders = sorted(each for each in os.listdir(tmp_path / name) if each.startswith("checkpoint-"))
        state = json.loads((tmp_path / name / folders[-1] / "trainer_state.json").read_text())
        assert Path(state["best_model_checkpoint"]).parent == tmp_path / name
        outcomes.append((result(trainer), folders, best.name))
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0][1]) == left


def test_a_folder_of_another_run_is_refused_before_training(tmp_path: Path, alone: Any) -> None:
    shutil.copytree(alone[0] / "checkpoint-4", tmp_path / "checkpoint-4")
    trainer = train_gpt2.trainer_in(tmp_path, [CheckpointCallback()])
    with pytest.raises(CheckpointExistsError, match="starts from scratch, .* checkpoints of steps 4. Resume from"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_damaged_checkpoint_is_set_aside(tmp_path: Path, alone: Any) -> None:
    trained(tmp_path, CheckpointCallback(), steps=8)
    with open(tmp_path / "checkpoint-8" / "optimizer.pt", "r+b") as file:
        file.seek(5000)
        file.write(b"damage")
    with pytest.raises(CheckpointCorruptError, match="step 8 is damaged.*resumes from step 4.*optimizer.pt"):
        trained(tmp_path, CheckpointCallback(), resume=True)
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-4")


def test_the_script_of_the_page_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (script,) = re.findall(
        r"```python notest: tests/integrations/test_transformers[^\n]*\n(.*?)```", PAGE.read_text(), re.DOTALL
    )
    script = script.replace(
        "report_to=[]", "report_to=[], use_cpu=True, dataloader_pin_memory=False, disable_tqdm=True"
    )
    script = script.replace("save_steps=20", "save_steps=2")
    for steps, left in ((4, {"checkpoint-2", "checkpoint-4"}), (6, {"checkpoint-4", "checkpoint-6"})):
        Path("train.py").write_text(script.replace("max_steps=60", f"max_steps={steps}"))
        trainer = runpy.run_path("train.py")["trainer"]
        assert trainer.state.global_step == steps
        assert {name for name in os.listdir("gpt2") if name.startswith("checkpoint-")} == left
    assert trainer._initial_global_step == 4
    (listing,) = re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert set(os.listdir("gpt2/checkpoint-6")) == set(listing.split())


class Preempted(TrainerCallback):
    """Asks for a save as SIGTERM does with `enable_jit_checkpoint`."""

    manager: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 6:
            self.manager.is_checkpoint_requested = True


def test_a_save_on_sigterm_is_ours_too(tmp_path: Path, alone: Any) -> None:
    preempted = Preempted()
    trainer = train_gpt2.trainer_in(tmp_path, [CheckpointCallback(), preempted], enable_jit_checkpoint=True)
    preempted.manager = next(
        each.jit_manager for each in trainer.callback_handler.callbacks if hasattr(each, "jit_manager")
    )
    trainer.train()
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-6")
    names = set(os.listdir(tmp_path / "checkpoint-6"))
    assert names > OURS and "checkpoint-is-incomplete.txt" not in names


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("async_persistant",), "async_persistent"),
        (("async_persistent", ["checkpoint.writer.worker=4"]), "checkpoint.writer.workers"),
        (
            ("async_persistent", ["checkpoint.dir=elsewhere"]),
            "has no effect here; use TrainingArguments.output_dir=....",
        ),
        (("async_persistent", ["checkpoint.save.every_steps=5"]), "save_steps"),
        (("async_persistent", ["checkpoint/writer=dcp"]), "the files are those of Trainer"),
        (("async_persistent", "checkpoint.overlap=skip"), "must be a list"),
        ((3,), "A checkpoint config is a preset's name"),
    ],
)
def test_a_typo_is_refused_where_it_is_made(arguments: Any, text: str) -> None:
    with pytest.raises(CheckpointConfigError, match=text) as caught:
        CheckpointCallback(*arguments)
    assert len(str(caught.value)) < 300


def test_what_cannot_be_saved_so_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(CheckpointTypeError, match="is for transformers.Trainer"):
        CheckpointCallback().on_train_begin(None, None, None)
    both = [CheckpointCallback(), CheckpointCallback("sync")]
    with pytest.raises(CheckpointConfigError, match="it has another CheckpointCallback; leave one of them out"):
        trained(tmp_path / "two", *both)
    both[0].on_train_end(None, None, None)
    trainer = train_gpt2.trainer_in(tmp_path, [CheckpointCallback()])
    trainer.is_fsdp_enabled = False
    trainer.is_deepspeed_enabled = True
    callback = next(each for each in trainer.callback_handler.callbacks if isinstance(each, CheckpointCallback))
    self = trainer  # noqa: F841  (the callback looks for the calling Trainer)
    with pytest.raises(CheckpointConfigError, match="DeepSpeed writes its own checkpoints; leave out"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks(tmp_path: Path) -> None:
    """Two gloo ranks: the same losses with and without the callback, and after a kill of all processes in a save."""
    arguments = 'arguments={"ddp_backend": "gloo"}'

    def launch(name: str, *settings: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [*command, str(tmp_path / name), arguments, *settings],
            capture_output=True,
            text=True,
            timeout=190,
            check=False,
            env=environment,
        )

    def outcome(done: subprocess.CompletedProcess[str]) -> Any:
        assert done.returncode == 0, done.stderr[-3000:]
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
        return json.loads(line.removeprefix("RESULT"))

    expected = outcome(launch("alone"))
    assert launch("ours", "callback=async_persistent", f"overrides={SLOWLY}", "kill=8", "whom=all").returncode != 0
    assert get_last_checkpoint(str(tmp_path / "ours")) == str(tmp_path / "ours" / "checkpoint-4")
    assert outcome(launch("ours", "callback=async_persistent", "resume=true")) == expected
    names = set(os.listdir(tmp_path / "ours" / "checkpoint-12"))
    assert names == {*os.listdir(tmp_path / "alone" / "checkpoint-12"), *OURS, "integrity-1.json"}
    assert {"rng_state_0.pth", "rng_state_1.pth"} < names
