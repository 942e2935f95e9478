"""What a save of a LoRA run writes and costs: with shared files, without, by torch.save, and in Trainer.

    python benchmarks/adapters.py FOLDER

Needs transformers and peft. One frozen GPT-2 of 0.8 GB, an adapter on its attention, AdamW on the adapter; four saves
per row, of which the last two count. In the own loop a checkpoint has everything; Trainer's have the adapter alone.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from ckpt_component import build_manager
from ckpt_component.integrations.transformers import CheckpointCallback

SAVES, STEPS_PER_SAVE = 4, 2


def lora_model() -> Any:
    """A frozen GPT-2 with an adapter."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=12, n_embd=1024, n_head=16, use_cache=False)
    return get_peft_model(GPT2LMHeadModel(config), LoraConfig(task_type="CAUSAL_LM", fan_in_fan_out=True))


def train(save: Callable[[int, dict[str, Any]], None], model: Any) -> None:
    """An own loop, which saves everything."""
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), 1e-3)
    tokens = torch.randint(0, 50_000, (1, 16))
    for step in range(1, SAVES * STEPS_PER_SAVE + 1):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % STEPS_PER_SAVE == 0:
            save(step, {"model": model, "optimizer": optimizer})


def own_loop(folder: Path, *overrides: str) -> list[tuple[float, float, float]]:
    """Bytes, stall and seconds until durable of each save by a manager."""
    model = lora_model()
    saving = ["checkpoint.save.every_steps=null", "checkpoint.keep.last=null", *overrides]
    with build_manager("async_persistent", saving, dir=folder) as manager:

        def save(step: int, state: dict[str, Any]) -> None:
            manager.save(step, state)
            manager.wait()

        train(save, model)
    return [(report.bytes, report.stall_s, report.committed_s) for report in manager.reports]


def torch_save(folder: Path) -> list[tuple[float, float, float]]:
    """The same by `torch.save`, with an fsync."""
    figures, model = [], lora_model()

    def save(step: int, state: dict[str, Any]) -> None:
        began, path = time.perf_counter(), folder / f"{step}.pt"
        torch.save({name: value.state_dict() for name, value in state.items()}, path)
        with path.open("rb+") as file:
            os.fsync(file)
        seconds = time.perf_counter() - began
        figures.append((float(path.stat().st_size), seconds, seconds))

    train(save, model)
    return figures


class Timed(TrainerCallback):
    """Measures the saves of Trainer."""

    def __init__(self) -> None:
        self.began, self.seconds = 0.0, list[float]()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """The save follows."""
        self.began = time.perf_counter()

    def on_save(self, *_: Any, **__: Any) -> None:
        """The save has returned."""
        self.seconds.append(time.perf_counter() - self.began)


def trainer(folder: Path, *callbacks: TrainerCallback) -> list[tuple[float, float, float]]:
    """Trainer's saves, of the adapter; what is on disk, and how long training waited."""
    timed, tokens = Timed(), torch.randint(0, 50_000, (32, 16))
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=SAVES * STEPS_PER_SAVE, save_steps=STEPS_PER_SAVE, report_to=[],
        per_device_train_batch_size=1, use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    data: Any = [{"input_ids": row, "labels": row} for row in tokens]
    Trainer(lora_model(), arguments, train_dataset=data, callbacks=[timed, *callbacks]).train()
    sizes = [
        sum(path.stat().st_size for path in each.rglob("*") if path.is_file())
        for each in sorted(folder.glob("checkpoint-*"))
    ]
    return [(float(size), seconds, float("nan")) for size, seconds in zip(sizes, timed.seconds, strict=True)]


def main() -> None:
    """Print the table."""
    root = Path(sys.argv[1])
    rows: dict[str, Callable[[Path], list[tuple[float, float, float]]]] = {
        "own loop, `async_persistent`": own_loop,
        "own loop, `checkpoint.reuse.mode=off`": lambda folder: own_loop(folder, "checkpoint.reuse.mode=off"),
        "own loop, `torch.save`": torch_save,
        "Trainer, `CheckpointCallback()`": lambda folder: trainer(folder, CheckpointCallback()),
        "Trainer alone": trainer,
    }
    print("| row | MB written by a save | training waits (s) | durable after (s) |\n|---|---|---|---|")
    for name, row in rows.items():
        folder = root / str(len(name))
        folder.mkdir(parents=True)
        nbytes, stall, durable = map(statistics.median, zip(*row(folder)[2:], strict=True))
        print(f"| {name} | {nbytes / 1e6:.1f} | {stall:.3f} | {'-' if durable != durable else f'{durable:.3f}'} |")
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
