"""PEFT, TRL and Axolotl: what fine-tunes with the Trainer of transformers saves with its callback."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", "5.0", reason="needs transformers 5: pip install '.[transformers]'")

from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, Trainer, TrainingArguments

from ckpt_component import CheckpointConfigError
from ckpt_component.integrations.transformers import CheckpointCallback

pytestmark = pytest.mark.filterwarnings("ignore")

COMMON: dict[str, Any] = {
    "max_steps": 4,
    "save_steps": 2,
    "logging_steps": 1,
    "per_device_train_batch_size": 2,
    "lr_scheduler_type": "constant",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}


def model() -> GPT2LMHeadModel:
    torch.manual_seed(3)
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=50, n_positions=32))


def rows() -> list[list[int]]:
    return torch.randint(0, 50, (24, 8), generator=torch.Generator().manual_seed(0)).tolist()


def losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def saved(folder: Path) -> list[str]:
    names = sorted(name for name in os.listdir(folder) if name.startswith("checkpoint-"))
    assert all((folder / name / "manifest.json").is_file() for name in names)
    return names


def with_adapters(folder: Path, *names: str) -> Trainer:
    peft = pytest.importorskip("peft", reason="needs peft: pip install peft")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    adapted = peft.get_peft_model(model(), config)
    for name in names:
        adapted.add_adapter(name, config)
    data = [{"input_ids": row, "labels": row} for row in rows()]
    args = TrainingArguments(output_dir=str(folder), **COMMON)
    return Trainer(adapted, args, train_dataset=data, callbacks=[CheckpointCallback()])


def test_an_adapter_is_saved_and_resumed(tmp_path: Path) -> None:
    whole = with_adapters(tmp_path / "whole")
    whole.train()
    stopped = with_adapters(tmp_path / "parts")
    stopped.args.max_steps = 2
    stopped.train()
    assert saved(tmp_path / "parts") == ["checkpoint-2"]
    assert (tmp_path / "parts" / "checkpoint-2" / "adapter_model.safetensors").is_file()
    rest = with_adapters(tmp_path / "parts")
    rest.train(resume_from_checkpoint=True)
    assert losses(rest) == losses(whole) and len(losses(rest)) == 4
    assert saved(tmp_path / "parts") == ["checkpoint-2", "checkpoint-4"] == saved(tmp_path / "whole")


def test_adapters_in_subfolders_are_refused_before_training(tmp_path: Path) -> None:
    trainer = with_adapters(tmp_path, "ref")
    with pytest.raises(CheckpointConfigError, match="PEFT writes the adapter 'ref' into a subfolder"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_trl_resumes_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="needs trl: pip install trl")
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {"<eos>": 0, **{f"w{number}": number for number in range(1, 50)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<eos>")), eos_token="<eos>", pad_token="<eos>"
    )
    data = Dataset.from_dict({"input_ids": rows()})

    def trainer(name: str) -> Any:
        args = trl.SFTConfig(output_dir=str(tmp_path / name), bf16=False, **COMMON)
        callbacks = [] if name == "alone" else [CheckpointCallback()]
        return trl.SFTTrainer(model(), args=args, train_dataset=data, processing_class=tokenizer, callbacks=callbacks)

    alone = trainer("alone")
    alone.train()
    ours = trainer("ours")
    ours.train()
    assert losses(ours) == losses(alone) and len(losses(ours)) == 4
    assert saved(tmp_path / "ours") == ["checkpoint-2", "checkpoint-4"]
    names = set(os.listdir(tmp_path / "alone" / "checkpoint-2"))
    assert set(os.listdir(tmp_path / "ours" / "checkpoint-2")) == {
        *names,
        "manifest.json",
        "integrity-0.json",
        "run.json",
    }
    (tmp_path / "ours" / "checkpoint-4").rename(tmp_path / "step-4")  # from step 2 to 4 again
    again = trainer("ours")
    again.train(resume_from_checkpoint=True)
    assert losses(again) == losses(alone)


def test_the_plugin_of_axolotl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for Axolotl, which needs CUDA packages: what its plugin manager and its builder do with a plugin."""
    pytest.importorskip("pydantic")
    base = ModuleType("axolotl.integrations.base")
    base.BasePlugin = type("BasePlugin", (), {})  # type: ignore[attr-defined]
    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "axolotl.integrations.base", base)
    monkeypatch.delitem(sys.modules, "ckpt_component.integrations.axolotl", raising=False)
    from ckpt_component.integrations import axolotl

    monkeypatch.delitem(sys.modules, "ckpt_component.integrations.axolotl")
    plugin = axolotl.Plugin()
    assert plugin.get_input_args() == "ckpt_component.integrations.axolotl.Args"
    with pytest.raises(CheckpointConfigError, match="async_persistent"):
        plugin.add_callbacks_pre_trainer(SimpleNamespace(ckpt_preset="async_persistant", ckpt_overrides=[]), None)
    callbacks = plugin.add_callbacks_pre_trainer(axolotl.Args(), None)
    data = [{"input_ids": row, "labels": row} for row in rows()]
    args = TrainingArguments(output_dir=str(tmp_path), **COMMON)
    Trainer(model(), args, train_dataset=data, callbacks=callbacks).train()
    assert saved(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    assert json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["global_step"] == 4
