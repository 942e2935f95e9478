"""What saves and restores of a QLoRA run write and cost, with the quantized base in the checkpoint and without.

    python benchmarks/qlora.py FOLDER

Needs transformers, peft and bitsandbytes. A Llama of 180 million parameters whose layers have 4 bits with double
quantization, an adapter on each, AdamW on the adapter; of the later saves, the medians. A restore is in the same
process, its files are in the page cache.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import bitsandbytes
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from ckpt_component import build_manager

NN: Any = bitsandbytes.nn
SAVES = 5
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def qlora_model() -> Any:
    """A frozen Llama whose layers are quantized, with an adapter."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=1024, intermediate_size=2816, num_hidden_layers=12, num_attention_heads=16, vocab_size=16_000
        )
    )
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, linear in [*block.named_children()]:
                if name in NAMES:
                    size = (linear.in_features, linear.out_features)
                    new = NN.Linear4bit(*size, bias=False, compute_dtype=torch.float32, quant_type="nf4")
                    new.load_state_dict({"weight": linear.weight.data})
                    setattr(block, name, new.requires_grad_(False).to("cpu"))  # quantizes
    model.is_loaded_in_4bit = True
    return get_peft_model(model, LoraConfig(r=16, target_modules=[*NAMES], task_type="CAUSAL_LM"))


def measure(folder: Path, frozen: str) -> str:
    """A row of the table."""
    overrides = [f"checkpoint.save.frozen={frozen}", "checkpoint.save.at_end=false"]
    model = qlora_model()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 1e-4)
    tokens = torch.randint(0, 16_000, (1, 16))
    with build_manager("async_persistent", overrides, dir=folder) as manager:
        for step in range(1, SAVES + 1):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.save(step, {"model": model, "optimizer": optimizer})
            manager.wait()
    first, *later = manager.reports
    size = sum(path.stat().st_size for path in (folder / f"iter_{SAVES:07d}").iterdir())
    restores = []
    for _ in range(3):
        with build_manager("async_persistent", overrides, dir=folder) as manager:
            began = time.perf_counter()
            manager.restore({"model": model, "optimizer": optimizer})
            restores.append(time.perf_counter() - began)
    figures = (
        size / 1e6,
        first.bytes / 1e6,
        statistics.median(report.bytes for report in later) / 1e6,
        first.stall_s,
        statistics.median(report.stall_s for report in later),
        statistics.median(restores),
    )
    return f"| `{frozen}` | {' | '.join(f'{each:.1f}' for each in figures[:3])} | " + (
        f"{' | '.join(f'{each:.3f}' for each in figures[3:])} |"
    )


def main() -> None:
    """Print the table."""
    print("| `save.frozen` | a checkpoint, MB | first save, MB | others, MB | first call, s | others, s | restore, s |")
    print("|---|---|---|---|---|---|---|")
    for frozen in ("keep", "skip"):
        print(measure(Path(sys.argv[1]) / frozen, frozen), flush=True)


if __name__ == "__main__":
    main()
