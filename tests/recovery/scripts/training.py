"""A run of the tests: restores, trains, saves, and ends as its plan says. Tells what it saw."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from snapshots import MEMORY, tell

from ckpt_component import CheckpointListener, LoadReport, PerRank, SaveReport, build_manager
from ckpt_component.state.paths import WhenResized


class Rng:
    """The state of torch's generator, which the losses depend on."""

    def state_dict(self) -> dict[str, Any]:
        return {"cpu": torch.get_rng_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        torch.set_rng_state(state["cpu"])


class Epochs:
    """A Python object with a history."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = list(state["seen"])


class Training:
    """A small model on noise; gradients are averaged over the ranks.

    Args:
        small: number of tensors of four values, besides those of the model
        frozen: number of values of a weight that never changes
        averages: whether ranks see other data, and average their gradients; False: a step needs no other rank
        resized: what becomes of the generator's state when there are more ranks, or fewer
        on_meta: whether the model gets its memory from the checkpoint
    """

    def __init__(
        self,
        rank: int,
        *,
        small: int = 0,
        frozen: int = 0,
        averages: bool = True,
        resized: WhenResized = "first",
        on_meta: bool = False,
    ) -> None:
        torch.manual_seed(7)
        self._averages = averages and dist.get_world_size() > 1
        with torch.device("meta" if on_meta else "cpu"):
            self.model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.epochs, self.rng = Epochs(), Rng()
        self.resized = resized
        self.small = {f"small{number}": torch.full((4,), float(number)) for number in range(small)}
        self.frozen = {"frozen": torch.arange(frozen, dtype=torch.float32)} if frozen else {}
        torch.manual_seed(100 + rank * averages)

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "epochs": self.epochs,
            "rng": PerRank(self.rng, when_resized=self.resized),
            "small": self.small,
            **self.frozen,
        }

    def step(self, step: int) -> float:
        data = torch.randn(8, 16)
        loss = (self.model(data) - data.sum(1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        if self._averages:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad.div_(dist.get_world_size())
        self.optimizer.step()
        for value in self.small.values():
            value += 1
        self.epochs.seen.append(step)
        return float(loss)

    def digest(self) -> str:
        """Of every bit of the state."""
        total = hashlib.sha256()

        def add(value: Any) -> None:
            if isinstance(value, torch.Tensor) and value.is_meta:
                total.update(b"meta")
            elif isinstance(value, torch.Tensor):
                total.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            elif isinstance(value, Mapping):
                for key in sorted(value, key=str):
                    total.update(str(key).encode())
                    add(value[key])
            elif hasattr(value, "state_dict"):
                add(value.state_dict())
            elif isinstance(value, PerRank):
                add(value.value)
            else:
                total.update(repr(value).encode())

        add(self.state)
        return total.hexdigest()


class Source(CheckpointListener):
    """Where the last restore was from, and which step was at its peers last."""

    source: str | None = None
    at_peers = 0

    def on_restored(self, report: LoadReport) -> None:
        self.source = report.source

    def on_at_peers(self, report: SaveReport) -> None:
        self.at_peers = report.step or 0


def train(rank: int, world_size: int, folder: Path) -> None:
    """One rank.

    The plan: `dir` (instead of `run` in the folder), `cwd` (the working folder), `steps` (the last step), `overrides`, `recovery` (False: none),
    `durable` (steps to save in the folder), `by_hand` (those of them to keep in memory first), `waits` (for each save), `pause` (after this step tell it by a
    file `ready-RANK`, and go on when the file `go` is there), `together` (False: a rank ends without the others),
    `at_peers` (a step, after which to wait until its snapshot is at its peers), `slow` (seconds after each step);
    `end`: `close`, `kill`, `raise` (inside the `with` block), `outside` (without a `with` block), `exit`, `hang` (pause,
    and close); `state`: arguments of `Training`; `runtime`: its `CKPT_RUNTIME_DIR`; `ranks`: what is different on a rank.
    """
    plan = json.loads(os.environ["CKPT_TEST_PLAN"])
    plan |= plan.get("ranks", {}).get(str(rank), {})
    if "runtime" in plan:
        os.environ["CKPT_RUNTIME_DIR"] = plan["runtime"]
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
    os.chdir(plan.get("cwd", "."))
    training, source = Training(rank, **plan.get("state", {})), Source()
    overrides = ["checkpoint.save.every_steps=1000", "checkpoint.save.at_end=false"]
    overrides += MEMORY if plan.get("recovery", True) else []
    overrides += plan.get("overrides", [])
    try:
        manager = build_manager("async_persistent", overrides, dir=plan.get("dir") or folder / "run")
    except Exception as error:
        tell(refused=f"{type(error).__name__}: {error}")
        dist.barrier()  # the store ends with the first rank
        raise
    manager.add_listener(source)

    def run() -> None:
        before = training.digest()
        try:
            restored = manager.restore(training.state)
        except Exception as error:
            tell(failed=f"{type(error).__name__}: {error}", untouched=training.digest() == before)
            raise
        manager.wait()  # the listener has heard it
        tell(restored=restored, source=source.source, began=training.digest(), untouched=training.digest() == before)
        losses, digests = {}, {}
        for step in range((restored or 0) + 1, plan.get("steps", 0) + 1):
            losses[step], digests[step] = training.step(step), training.digest()
            durable, by_hand = step in plan.get("durable", []), step in plan.get("by_hand", [])
            if not durable or by_hand:
                manager.maybe_save(step, training.state)
            if durable:
                manager.save(step, training.state)
            if plan.get("waits"):
                manager.wait()
            if step == plan.get("pause"):
                pause(folder, rank)
            until = time.monotonic() + 30
            while step == plan.get("at_peers") != source.at_peers:
                assert time.monotonic() < until, "it is not at its peers"
                time.sleep(0.01)
            if plan.get("slow"):
                time.sleep(plan["slow"])
        manager.wait()
        tell(losses=losses, digests=digests, steps=manager.steps())
        if plan.get("together", True):
            dist.barrier()
        end(plan.get("end", "close"), folder, rank)

    if plan.get("end") == "outside":
        run()
        raise ValueError("the loss is NaN")
    with manager:
        run()


def end(how: str, folder: Path, rank: int) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "raise":
        raise ValueError("the loss is NaN")
    elif how == "exit":
        sys.exit(0)
    elif how == "hang":
        pause(folder, rank)


def pause(folder: Path, rank: int) -> None:
    (folder / f"ready-{rank}").write_text("")
    while not (folder / "go").exists():
        time.sleep(0.01)
