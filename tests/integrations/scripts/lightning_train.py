"""A small Lightning run for the tests, which kill and resume it. Prints nothing; the losses go to a file.

python lightning_train.py LOSSES [key=value ...]
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import random
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, random_split

OPTIONS: dict[str, Any] = {
    "package": "lightning.pytorch",
    "use": "callback",  # callback, io, both, lightning (neither)
    "dir": "checkpoints",
    "every": 3,
    "epochs": 4,
    "steps": -1,
    "kill_at": -1,  # a SIGKILL to itself at the beginning of this batch
    "stop_at": -1,  # likewise `signal`, to the last rank
    "signal": "SIGTERM",
    "slurm": "",  # a folder with stand-ins for the commands of Slurm: a job of this many tasks, its number is 77
    "failpoint": "",  # see ckpt_component.core.storage.failpoint_fs
    "workers": 0,
    "accumulate": 1,
    "val_interval": 1.0,
    "devices": 1,
    "preset": "async_persistent",
    "override": "",
    "resume": "",  # a .ckpt for Trainer.fit, or "last"
    "loader": "plain",
    "width": 16,
    "seed": 7,
}


class Noise(Dataset[torch.Tensor]):
    """48 vectors; a fetch draws from all three generators, like an augmentation."""

    def __init__(self) -> None:
        self.data = torch.randn(48, 16, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, number: int) -> torch.Tensor:
        shift = random.random() + float(numpy.random.rand()) + float(torch.rand(()))
        return self.data[number] + 0.01 * shift


class Counted(DataLoader[Any]):
    """A loader with a state of its own: which batches are left of the epoch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.order: list[int] = []
        self.done = 0
        self.loaded: dict[str, Any] | None = None

    def __iter__(self) -> Any:
        loaded, self.loaded = self.loaded, None
        if loaded is None:
            self.order, self.done = torch.randperm(len(self)).tolist(), 0
        else:
            self.order, self.done = loaded["order"], loaded["done"]
        for number in self.order[self.done :]:
            self.done += 1
            yield torch.stack([self.dataset[4 * number + each] for each in range(4)])

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order), "done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def main(losses: str, given: list[str]) -> None:
    options = dict(OPTIONS)
    for text in given:
        key, _, value = text.partition("=")
        options[key] = type(OPTIONS[key])(value)
    if options["failpoint"]:
        os.environ["CKPT_FAILPOINT"] = options["failpoint"]
        os.environ["CKPT_FAILPOINT_LOG"] = os.path.abspath(f"{losses}.operations")
    if options["slurm"]:
        os.environ["PATH"] = f"{options['slurm']}:{os.environ['PATH']}"
        names = {"JOB_ID": 77, "JOB_NAME": "x", "NTASKS": 1, "PROCID": 0, "LOCALID": 0, "NODEID": 0}
        os.environ |= {f"SLURM_{name}": str(value) for name, value in names.items()}
    warnings.simplefilter("ignore")
    warnings.filterwarnings("always", "You're resuming")
    pl = importlib.import_module(options["package"])
    pl.seed_everything(options["seed"])

    class Module(pl.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"path": Path("x"), "lr": 0.1})
            width = options["width"]
            self.net = torch.nn.Sequential(
                torch.nn.Linear(16, width),
                torch.nn.BatchNorm1d(width),
                torch.nn.Dropout(0.3),
                torch.nn.Linear(width, 1),
            )
            self.lines = Path(f"{losses}.{os.environ.get('LOCAL_RANK', '0')}")

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch).square().mean() + 0.1 * random.random()
            self.log("loss", loss)
            lr = self.trainer.optimizers[0].param_groups[0]["lr"]
            entry = [self.trainer.global_step, self.trainer.current_epoch, number, float(loss).hex(), lr]
            entry.append(self.trainer.fit_loop.epoch_loop._batches_that_stepped)
            with self.lines.open("a") as lines:
                print(json.dumps(entry), file=lines)
            return loss

        def validation_step(self, batch: torch.Tensor, number: int) -> None:
            self.log("val_loss", self.net(batch).square().mean())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 11, 30], 0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

        def train_dataloader(self) -> Any:
            kind = Counted if options["loader"] == "counted" else DataLoader
            part, _ = random_split(Noise(), [40, 8])
            return kind(part, batch_size=4, shuffle=True, num_workers=options["workers"])

        def val_dataloader(self) -> Any:
            return DataLoader(Noise(), batch_size=16)

    class Signals(pl.Callback):  # type: ignore[name-defined]
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
            if trainer.fit_loop.epoch_loop.total_batch_idx == options["kill_at"]:
                # So that it is known which checkpoint the next run finds.
                managers = [getattr(callback, "manager", None) for callback in trainer.callbacks]
                for saving in (trainer.strategy.checkpoint_io, *managers):
                    if hasattr(saving, "wait"):
                        saving.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            last = trainer.global_rank == trainer.world_size - 1
            if last and trainer.fit_loop.epoch_loop.total_batch_idx == options["stop_at"]:
                os.kill(os.getpid(), getattr(signal, options["signal"]))

    callbacks: list[Any] = [Signals()]
    plugins: list[Any] = []
    overrides = [f"checkpoint.save.every_steps={options['every']}", *filter(None, options["override"].split(","))]
    if options["use"] in ("callback", "both"):
        from ckpt_component.integrations.lightning import CheckpointCallback

        callbacks.append(CheckpointCallback(options["preset"], overrides, dir=options["dir"]))
    if options["use"] in ("io", "both"):
        from ckpt_component.integrations.lightning import BackgroundCheckpointIO

        plugins.append(BackgroundCheckpointIO(options["preset"]))
    if options["use"] in ("io", "lightning", "both"):
        callbacks.append(
            pl.callbacks.ModelCheckpoint(
                f"{options['dir']}-ckpt", save_top_k=-1, save_last=True, every_n_train_steps=options["every"]
            )
        )
    interval = options["val_interval"]
    trainer = pl.Trainer(
        max_epochs=options["epochs"],
        max_steps=options["steps"],
        accelerator="cpu",
        devices=options["devices"],
        strategy="ddp" if options["devices"] > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=options["accumulate"],
        val_check_interval=interval if interval <= 1.0 else int(interval),
        callbacks=callbacks,
        plugins=plugins,
    )
    trainer.fit(Module(), ckpt_path=options["resume"] or None, weights_only=False)


def serve(package: str) -> None:
    """Import Lightning once, then make each run, a line of JSON on stdin, in a process forked for it.

    A line is [folder, losses, option, ...]; the answer on stdout is the exit status, as `os.waitstatus_to_exitcode`.
    """
    importlib.import_module(package)
    importlib.import_module("ckpt_component.integrations.lightning")
    for line in sys.stdin:
        folder, *arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            os.chdir(folder)
            sys.argv = [__file__, *arguments]  # what Lightning starts the other ranks with
            log = os.open(f"{arguments[0]}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(log, 1)
            os.dup2(log, 2)
            code = 1
            try:
                main(arguments[0], arguments[1:])
                code = 0
            except SystemExit as exit:
                code = int(exit.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO)
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        main(sys.argv[1], sys.argv[2:])
