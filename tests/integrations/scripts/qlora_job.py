"""QLoRA with PEFT on a small Llama: `qlora_job.py begin|resume FOLDER`. Prints losses; `begin` ends by a kill.

Each case is a kind of quantization and what `checkpoint.save.frozen` is. The base of the run that resumes is another
random one if the checkpoint has it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import bitsandbytes
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from ckpt_component import CheckpointLoadError, build_manager

NN: Any = bitsandbytes.nn
KINDS = ("4 bits", "double", "8 bits")
LAYERS = 2
STEPS = 3


def quantized(linear: torch.nn.Linear, kind: str) -> torch.nn.Module:
    size: Any = (linear.in_features, linear.out_features)
    if kind == "8 bits":
        new: Any = NN.Linear8bitLt(*size, bias=False, has_fp16_weights=False)
    else:
        new = NN.Linear4bit(
            *size, bias=False, compute_dtype=torch.float32, compress_statistics=kind == "double", quant_type="nf4"
        )
    new.load_state_dict({"weight": linear.weight.data})
    new.requires_grad_(False)
    layer = new.to("cpu")  # quantizes
    assert isinstance(layer, torch.nn.Module)
    return layer


def make(kind: str, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=200,
    )
    base: Any = LlamaForCausalLM(config)
    for layer in base.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, linear in [*block.named_children()]:
                if isinstance(linear, torch.nn.Linear):
                    setattr(block, name, quantized(linear, kind))
    setattr(base, "is_loaded_in_8bit" if kind == "8 bits" else "is_loaded_in_4bit", True)
    torch.manual_seed(9)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    return model, torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)


def train(model: Any, optimizer: torch.optim.Optimizer, begin: int) -> list[float]:
    losses = []
    for step in range(begin, begin + STEPS):
        ids = torch.randint(0, 200, (2, 16), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(command: str, folder: str) -> None:
    for kind in KINDS:
        for frozen in ("keep", "skip"):
            overrides, place = [f"checkpoint.save.frozen={frozen}"], os.path.join(folder, kind, frozen)
            resumes = command == "resume"
            model, optimizer = make(kind, 1 if resumes and frozen == "keep" else 0)
            state = {"model": model, "optimizer": optimizer}
            if not resumes:
                train(model, optimizer, 0)
            with build_manager("async_persistent", overrides, dir=place) as manager:
                if resumes:
                    assert manager.restore(state) == STEPS
                else:
                    manager.save(STEPS, state)
                    manager.wait()
                print(json.dumps([kind, frozen, train(model, optimizer, STEPS)]), flush=True)
            if resumes and frozen == "skip":
                model, optimizer = make(kind, 1)
                with build_manager("async_persistent", overrides, dir=place) as manager:
                    try:
                        manager.restore({"model": model, "optimizer": optimizer})
                    except CheckpointLoadError as error:
                        print(json.dumps([kind, "other base", str(error)]), flush=True)
    if command == "begin":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
