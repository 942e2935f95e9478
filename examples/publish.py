"""Train a tiny language model and publish its weights as it learns; another process writes with those of the moment.

    python examples/publish.py            # trains and publishes
    python examples/publish.py write      # in a second terminal, at the same time, also on another host

It learns to write what stands in this file.
"""

import sys
from pathlib import Path

import torch
from torch.nn import Embedding, Flatten, Linear, ReLU

from ckpt_component import build_manager
from ckpt_component.publishing import follow

STEPS, CONTEXT, WEIGHTS = 300, 16, "runs/publish/weights"
text = Path(__file__).read_text()
letters = sorted(set(text))
codes = torch.tensor([letters.index(letter) for letter in text])
windows = codes.unfold(0, CONTEXT + 1, 1)

torch.manual_seed(0)
torch.set_num_threads(1)
hidden = [Linear(32 * CONTEXT, 256), ReLU(), Linear(256, len(letters))]
model = torch.nn.Sequential(Embedding(len(letters), 32), Flatten(), *hidden)


def train() -> None:
    """Train, and publish from each snapshot in memory."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    state = {"model": model, "optimizer": optimizer}
    settings = ["checkpoint/recovery=host", "checkpoint.recovery.every_steps=1", "checkpoint.save.every_steps=100"]
    settings += [f"checkpoint.publish.to={WEIGHTS}", "checkpoint.publish.dtype=bfloat16"]
    with build_manager("async_persistent", settings, dir="runs/publish/checkpoints") as manager:
        for step in range((manager.restore(state) or 0) + 1, STEPS + 1):
            batch = windows[torch.randint(len(windows), (64,))]
            loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            manager.maybe_save(step, state)


def write() -> None:
    """Write with each version that comes."""
    for weights in follow(WEIGHTS, timeout=60):
        model.load_state_dict(dict(weights.tensors()))
        written = codes[:CONTEXT].tolist()
        while len(written) < CONTEXT + 60:
            scores = model(torch.tensor([written[-CONTEXT:]]))[0]
            written.append(int(torch.multinomial(scores.softmax(0), 1)))
        print(f"step {weights.step}: {''.join(letters[code] for code in written)!r}", flush=True)
        if weights.step == STEPS:
            return


write() if sys.argv[1:] == ["write"] else train()
