"""Train a tiny GPT-2 with Trainer: `train_gpt2.py FOLDER [setting=value ...]`; prints the log and a digest as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import psutil
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from ckpt_component.integrations.transformers import CheckpointCallback

#: Per-run figures, which differ between runs.
TIMES = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos")


class Kill(TrainerCallback):
    """Kills this process with SIGKILL while the checkpoint of a step is being written; `all`: its writer process too."""

    def __init__(self, step: int, whom: str) -> None:
        self.step, self.whom = step, whom

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != self.step:
            return
        deadline = time.monotonic() + 60
        while not list(Path(args.output_dir).glob(f".ckpt-tmp.checkpoint-{self.step}.*/*.*")):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        print("in the save of step", self.step, flush=True)
        for child in psutil.Process().children() if self.whom == "all" else ():
            child.kill()
        os.kill(os.getpid(), signal.SIGKILL)


def data(count: int = 96) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 500, (count, 16), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer_in(
    folder: Path, callbacks: list[Any], *, steps: int = 12, every: int = 4, seed: int = 3, **arguments: Any
) -> Trainer:
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=500, n_positions=32))
    usual: dict[str, Any] = {
        "max_steps": steps,
        "save_steps": every,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "report_to": [],
        "use_cpu": True,
        "seed": seed,
        "disable_tqdm": True,
    }
    args = TrainingArguments(output_dir=str(folder), **{**usual, **arguments})
    rows = data()
    return Trainer(model, args, train_dataset=rows, eval_dataset=rows[:8], callbacks=callbacks)


def curve(trainer: Trainer) -> list[dict[str, Any]]:
    """The whole log, of the steps before a resume too, but for times."""
    rows = [row for row in trainer.state.log_history if "train_runtime" not in row]
    return [
        {key: value for key, value in row.items() if "runtime" not in key and "per_second" not in key} for row in rows
    ]


def digest(model: torch.nn.Module) -> str:
    """A hash of all parameters."""
    whole = hashlib.sha256()
    for tensor in model.state_dict().values():
        whole.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def main(folder: str, *settings: str) -> None:
    values = dict(setting.split("=", 1) for setting in settings)
    callbacks: list[Any] = []
    if "callback" in values:
        overrides = values.get("overrides", "").split(",") if values.get("overrides") else []
        callbacks.append(CheckpointCallback(values["callback"], overrides))
    if "kill" in values:
        callbacks.append(Kill(int(values["kill"]), values.get("whom", "trainer")))
    arguments = json.loads(values.get("arguments", "{}"))
    trainer = trainer_in(Path(folder), callbacks, **arguments)
    trainer.train(resume_from_checkpoint=values.get("resume") == "true")
    if trainer.is_world_process_zero():
        print("RESULT", json.dumps({"curve": curve(trainer), "digest": digest(trainer.model)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
