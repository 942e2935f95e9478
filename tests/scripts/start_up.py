"""Save and restore with every writer, in the background and in the trainer, and print what that has imported.

Only modules that are not there after `import torch` are printed, as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

FROM_TORCH = {*sys.modules}


def state_of(value: float) -> dict[str, Any]:
    """A model, and an optimizer's state. One of torch's own optimizers would import all of these modules itself."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    moments = {name: torch.full_like(parameter, value) for name, parameter in model.named_parameters()}
    return {"model": model, "moments": moments, "rate": value, "seeds": [torch.get_rng_state(), 7]}


def main(folder: str) -> None:
    """Six runs, each with a save and a restore."""
    from ckpt_component import build_manager

    for preset in ("async_persistent", "sync"):
        for writer in ("dcp", "torch_save", "safetensors"):
            run, overrides = f"{folder}/{preset}-{writer}", [f"checkpoint/writer={writer}"]
            keys = ("model", "moments") if writer == "safetensors" else ("model", "moments", "rate", "seeds")
            saved, restored = state_of(3.0), state_of(0.0)
            with build_manager(preset, overrides, dir=run) as manager:
                manager.save(3, {key: saved[key] for key in keys})
            with build_manager(preset, overrides, dir=run) as manager:
                step = manager.restore({key: restored[key] for key in keys})
            same = torch.equal(saved["model"][0].weight, restored["model"][0].weight)
            if step != 3 or not same:
                raise ValueError(f"{run} came back as step {step}, {'the same' if same else 'with other weights'}")
    print(json.dumps(sorted({*sys.modules} - FROM_TORCH)))


if __name__ == "__main__":
    main(sys.argv[1])
