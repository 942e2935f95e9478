"""Lightning with our callback and with our writer of `.ckpt` files: killed runs resume bit for bit."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run_program

from ckpt_component import CheckpointConfigError, CheckpointError, CheckpointTypeError, build_checkpointer
from ckpt_component.core.commit.run_record import stored_metrics
from ckpt_component.core.storage.locate import file_storage
from ckpt_component.exporting.export import ExportOptions, export_checkpoint

pl = pytest.importorskip("lightning.pytorch")

from ckpt_component.integrations.lightning import BackgroundCheckpointIO, CheckpointCallback  # noqa: E402

pytestmark = [
    pytest.mark.timeout(300),
    # Lightning's own: hints on workers, loggers and hardware, and what torch deprecates.
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SCRIPT = Path(__file__).parent / "scripts" / "lightning_train.py"
KILLED, DONE, TERMINATED, WARNED = -9, 0, 143, 85

#: Starts a run in a folder, with a name for its losses and options of the script; returns its exit code.
Run = Callable[..., int]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """One process imports Lightning, and forks for every run."""
    command = [sys.executable, str(SCRIPT), "serve", "lightning.pytorch"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None and server.stdout is not None

    def start(folder: Path, losses: str, **options: object) -> int:
        request = [str(folder), losses, *(f"{key}={value}" for key, value in options.items())]
        print(json.dumps(request), file=server.stdin, flush=True)
        assert server.stdout is not None
        return int(server.stdout.readline())

    yield start
    server.stdin.close()
    assert server.wait(60) == 0
    server.stdout.close()


def losses(folder: Path, name: str, rank: int = 0) -> list[Any]:
    """What each batch printed: step, epoch, number, loss, learning rate, and the step that loggers are given."""
    return [json.loads(line) for line in (folder / f"{name}.{rank}").read_text().splitlines()]


def assert_continues(part: list[Any], whole: list[Any], last: bool = False) -> int:
    """Whether a run is a part of the undisturbed one, bit for bit; returns where it began."""
    start = whole.index(part[0])
    assert part == whole[start : start + len(part)]
    assert not last or start + len(part) == len(whole)
    return start


def test_losses_are_the_same_with_and_without_us(run: Run, tmp_path: Path) -> None:
    assert run(tmp_path, "without", use="lightning", dir="theirs") == DONE
    assert run(tmp_path, "with", use="both", dir="ours") == DONE
    assert losses(tmp_path, "with") == losses(tmp_path, "without")
    assert sorted(os.listdir(tmp_path / "ours-ckpt")) == sorted(os.listdir(tmp_path / "theirs-ckpt"))


CASES: dict[str, tuple[list[int], dict[str, object]]] = {
    "in_an_epoch_and_again": ([8, 13], {"epochs": 2}),
    "at_an_epoch_after_validation": ([14], {"epochs": 2, "every": 5, "val_interval": 5}),
    "accumulation": ([13], {"every": 2, "accumulate": 3}),
    "at_an_epoch": ([12], {"every": 10}),
    "workers": ([13], {"workers": 2}),
    "loader_with_a_state": ([13, 17], {"loader": "counted"}),
    "zero_overhead": ([13], {"preset": "async_zero_overhead"}),
}
QUICK = ["in_an_epoch_and_again"]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_a_killed_run_resumes_bit_for_bit(case: str, run: Run, tmp_path: Path) -> None:
    kills, options = CASES[case]
    assert run(tmp_path, "whole", use="lightning", dir="theirs", **options) == DONE
    whole = losses(tmp_path, "whole")
    for number, batch in enumerate(kills):
        assert run(tmp_path, f"part{number}", kill_at=batch, **options) == KILLED
        start = assert_continues(losses(tmp_path, f"part{number}"), whole)
        assert (start > 0) == (number > 0)
    assert run(tmp_path, "rest", **options) == DONE
    assert assert_continues(losses(tmp_path, "rest"), whole, last=True) > 0


@pytest.mark.parametrize(
    ("failpoint", "step"),
    [
        ("make_folder:nth=3:process=trainer:action=kill", 3),
        pytest.param("rename_new:nth=2:process=trainer:action=kill", 3, marks=pytest.mark.slow),
        pytest.param("write:nth=8:process=writer:action=kill", None, marks=pytest.mark.slow),
    ],
)
def test_a_kill_in_the_middle_of_a_save(failpoint: str, step: int | None, run: Run, tmp_path: Path) -> None:
    assert run(tmp_path, "whole", use="lightning", dir="theirs") == DONE
    code = run(tmp_path, "killed", failpoint=failpoint)
    assert code == KILLED or (step is None and code == 1)  # a dead writer is an error of the trainer
    assert run(tmp_path, "rest") == DONE
    start = assert_continues(losses(tmp_path, "rest"), losses(tmp_path, "whole"), last=True)
    assert start > 0 and step in (start, None)


@pytest.mark.slow
def test_a_run_is_stopped_by_sigterm_and_extended_later(run: Run, tmp_path: Path) -> None:
    assert run(tmp_path, "whole", use="lightning", dir="theirs", epochs=3) == DONE
    whole = losses(tmp_path, "whole")
    assert run(tmp_path, "stopped", stop_at=4, every=100, epochs=1) == TERMINATED
    assert run(tmp_path, "first", epochs=1, every=100) == DONE
    assert losses(tmp_path, "stopped") + losses(tmp_path, "first") == whole[:10]
    assert run(tmp_path, "second", steps=17, every=100) == DONE
    assert run(tmp_path, "third", epochs=3, every=100) == DONE
    assert losses(tmp_path, "second") + losses(tmp_path, "third") == whole[10:]
    # A finished run trains nothing.
    assert run(tmp_path, "fourth", epochs=3, every=100) == DONE
    assert not (tmp_path / "fourth.0").exists()


def slurm(folder: Path, scontrol: str) -> str:
    """Stand-ins for the commands of Slurm."""
    (folder / "bin").mkdir()
    for name, text in {"srun": "", "scontrol": scontrol}.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    return str(folder / "bin")


@pytest.mark.parametrize(
    ("number", "scontrol", "code", "requeued"),
    [
        ("SIGUSR1", None, WARNED, ""),
        pytest.param("SIGTERM", None, TERMINATED, "", marks=pytest.mark.slow),
        pytest.param("SIGINT", None, 130, "", marks=pytest.mark.slow),
        ("SIGUSR1", 'ls checkpoints >> requeued; echo "$@" >> requeued', DONE, "requeue 77"),
        pytest.param("SIGTERM", 'echo "$@" >> requeued', TERMINATED, "", marks=pytest.mark.slow),
        pytest.param("SIGUSR1", "exit 1", WARNED, "", marks=pytest.mark.slow),
    ],
    ids=["warned", "ended", "interrupted", "slurm_warned", "slurm_ended", "slurm_fails"],
)
def test_a_signal_saves_the_step_and_the_exit_code_says_so(
    number: str, scontrol: str | None, code: int, requeued: str, run: Run, tmp_path: Path
) -> None:
    assert run(tmp_path, "whole", use="lightning", dir="theirs", epochs=2) == DONE
    options = {"every": 100, "epochs": 2, **({} if scontrol is None else {"slurm": slurm(tmp_path, scontrol)})}
    assert run(tmp_path, "stopped", stop_at=7, signal=number, **options) == code
    lines = (tmp_path / "requeued").read_text().splitlines() if (tmp_path / "requeued").exists() else []
    assert [line for line in lines if "requeue" in line] == [requeued] * bool(requeued)
    assert not requeued or "iter_0000007" in lines  # it was committed before
    assert [path.name for path in (tmp_path / "checkpoints").glob("iter_*")] == ["iter_0000007"]
    assert not list(tmp_path.glob("hpc_ckpt*"))
    assert run(tmp_path, "rest", **options) == DONE
    assert losses(tmp_path, "stopped") + losses(tmp_path, "rest") == losses(tmp_path, "whole")
    log = (tmp_path / "rest.log").read_text()
    assert f"Continuing after step 7 from {tmp_path}/checkpoints/iter_0000007, with its random states" in log
    assert "not resumable" not in log


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_after_the_same_step(run: Run, tmp_path: Path) -> None:
    options = {"devices": 2, "epochs": 200, "every": 10000}
    assert run(tmp_path, "stopped", stop_at=50, **options) == TERMINATED
    first, second = (losses(tmp_path, "stopped", rank) for rank in (0, 1))
    assert len(first) == len(second) > 50
    (saved,) = (tmp_path / "checkpoints").glob("iter_*")
    assert saved.name == f"iter_{len(first):07d}"


def test_lightnings_own_handlers_stay_if_asked_for(tmp_path: Path) -> None:
    handlers: list[Any] = []

    class Look(pl.Callback):  # type: ignore[name-defined]
        def on_train_batch_start(self, *arguments: Any) -> None:
            handlers.append(signal.getsignal(signal.SIGTERM))

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    for stops in (True, False):
        callback = CheckpointCallback("sync", dir=tmp_path / str(stops), stop_on_signal=stops)
        trainer(tmp_path, callbacks=[callback, Look()], limit_train_batches=1).fit(Line())
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
    ours, theirs = handlers
    assert type(theirs).__module__.startswith("lightning") and not type(ours).__module__.startswith("lightning")


@pytest.mark.slow
def test_lightning_reads_files_of_the_background_and_resumes_as_from_its_own(run: Run, tmp_path: Path) -> None:
    for use in ("lightning", "io"):
        assert run(tmp_path, f"{use}1", use=use, dir=use, kill_at=14) == KILLED
        assert run(tmp_path, f"{use}2", use=use, dir=use, resume="last") == DONE
        names = {path.name for path in (tmp_path / f"{use}-ckpt").iterdir()}
        assert {"last.ckpt", "epoch=0-step=9.ckpt", "epoch=3-step=39.ckpt"} <= names
    assert losses(tmp_path, "io1") == losses(tmp_path, "lightning1")
    assert losses(tmp_path, "io2") == losses(tmp_path, "lightning2")
    ours, theirs = tmp_path / "io-ckpt" / "last.ckpt", tmp_path / "lightning-ckpt" / "last.ckpt"
    assert zipfile.ZipFile(ours).testzip() is None
    one, other = (torch.load(path, weights_only=False) for path in (ours, theirs))
    assert list(one) == list(other) and one["hyper_parameters"] == other["hyper_parameters"]
    assert all(torch.equal(one["state_dict"][key], other["state_dict"][key]) for key in other["state_dict"])


@pytest.mark.slow
def test_two_ranks_are_killed_and_resume_bit_for_bit(run: Run, tmp_path: Path) -> None:
    options = {"devices": 2, "epochs": 3, "every": 2}
    assert run(tmp_path, "whole", use="lightning", dir="theirs", **options) == DONE
    assert run(tmp_path, "killed", use="both", kill_at=7, **options) != DONE
    assert run(tmp_path, "rest", use="both", **options) == DONE
    for rank in (0, 1):
        assert assert_continues(losses(tmp_path, "rest", rank), losses(tmp_path, "whole", rank), last=True) > 0


@pytest.mark.slow
def test_the_package_under_its_other_name(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    assert run(tmp_path, "whole", use="lightning", dir="theirs", epochs=2) == DONE
    command = [sys.executable, str(SCRIPT), "other", "package=pytorch_lightning", "use=both", "epochs=2"]
    for kill in (13, -1):
        done = subprocess.run([*command, f"kill_at={kill}"], cwd=tmp_path, capture_output=True, timeout=200)
        assert done.returncode == (DONE if kill < 0 else KILLED), done.stderr.decode()
    other, whole = losses(tmp_path, "other"), losses(tmp_path, "whole")
    assert other == whole[:13] + whole[12:]  # from step 12


class Line(pl.LightningModule):  # type: ignore[name-defined]
    """The smallest module."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(64, 64)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss: torch.Tensor = self.line(batch).square().mean()
        self.log("falls", -float(number))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> Any:
        rows: Any = torch.randn(8, 64)
        return torch.utils.data.DataLoader(rows, batch_size=1)

    def validation_step(self, batch: Any, number: int) -> None:
        pass

    def val_dataloader(self) -> Any:
        rows: Any = torch.randn(1, 64)
        return torch.utils.data.DataLoader(rows, batch_size=1)


def trainer(folder: Path, **arguments: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return pl.Trainer(**{"max_epochs": 1, "default_root_dir": folder, **quiet, **arguments})


def every_step(folder: Path, **arguments: Any) -> Any:
    return pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, **arguments)


def test_the_best_checkpoint_by_a_logged_metric_is_kept(tmp_path: Path) -> None:
    overrides = ["checkpoint.save.every_steps=2", "checkpoint.keep.last=1"]
    callback = CheckpointCallback(overrides=overrides, dir=tmp_path, monitor="falls", mode="max")
    trainer(tmp_path, callbacks=[callback]).fit(Line())
    steps = sorted(int(name[5:]) for name in os.listdir(tmp_path) if name.startswith("iter_"))
    assert steps == [2, 8]
    assert [stored_metrics(tmp_path / f"iter_{step:07d}")["falls"] for step in steps] == [-1, -7]


@pytest.mark.parametrize("ours_first", [True, False])
def test_the_best_file_of_a_model_checkpoint_is_found_in_any_order(ours_first: bool, tmp_path: Path) -> None:
    theirs = every_step(tmp_path / "theirs", monitor="falls", mode="max", save_top_k=1)
    callbacks = [CheckpointCallback(dir=tmp_path / "ours"), theirs]
    one = trainer(tmp_path, callbacks=callbacks if ours_first else callbacks[::-1])
    one.fit(Line())
    assert one.checkpoint_callback is theirs
    assert one.checkpoint_callback.best_model_path == str(tmp_path / "theirs" / "step=1.ckpt")


def test_a_checkpoint_becomes_a_ckpt_of_lightning_and_a_module(tmp_path: Path) -> None:
    module = Line()
    one = trainer(tmp_path, callbacks=[CheckpointCallback(dir=tmp_path / "ours")])
    one.fit(module)
    saved, file = tmp_path / "ours" / "iter_0000008", tmp_path / "newest.ckpt"
    export_checkpoint(str(saved), str(file), ExportOptions("torch", prefix="trainer"), file_storage())
    assert torch.equal(Line.load_from_checkpoint(file).line.weight, module.line.weight)
    other = Line()
    trainer(tmp_path).validate(other, ckpt_path=file, verbose=False)
    assert torch.equal(other.line.weight, module.line.weight)
    longer = trainer(tmp_path, max_epochs=2, enable_checkpointing=False)
    longer.fit(Line(), ckpt_path=file)
    assert longer.global_step == 16
    # The other way of the page: into a module.
    model = Line()
    weights = {"trainer": {"state_dict": model.state_dict()}}
    with build_checkpointer("sync") as checkpointer:
        checkpointer.load(saved, weights, strict=False)
    assert torch.equal(model.line.weight, module.line.weight)


def test_our_load_reads_a_ckpt_of_lightning(tmp_path: Path) -> None:
    module = Line()
    one = trainer(tmp_path, callbacks=[every_step(tmp_path, save_top_k=-1)], plugins=[BackgroundCheckpointIO()])
    one.fit(module)
    state = {"state_dict": Line().state_dict()}
    with build_checkpointer("sync") as checkpointer:
        checkpointer.load(tmp_path / "step=8.ckpt", state, strict=True)
    assert torch.equal(state["state_dict"]["line.weight"], module.line.weight)
    assert torch.equal(Line.load_from_checkpoint(tmp_path / "step=8.ckpt").line.weight, module.line.weight)


def test_an_old_file_is_deleted_only_after_the_new_one_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = tmp_path / "files"
    monkeypatch.setenv("CKPT_FAILPOINT_LOG", str(tmp_path / "operations"))
    monkeypatch.setenv("CKPT_FAILPOINT", "replace:from=4:action=raise:EIO")
    one = trainer(tmp_path, callbacks=[every_step(files)], plugins=[BackgroundCheckpointIO()])
    with caplog.at_level(logging.WARNING), pytest.raises(CheckpointError, match="step=4.ckpt could not be saved"):
        one.fit(Line())
    assert os.listdir(files) == ["step=3.ckpt"]
    assert "step=3.ckpt is kept" in caplog.text
    assert torch.load(files / "step=3.ckpt", weights_only=False)["global_step"] == 3


def test_an_error_of_the_last_save_is_raised_at_the_end_of_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_FAILPOINT_LOG", str(tmp_path / "operations"))
    monkeypatch.setenv("CKPT_FAILPOINT", "write:process=writer:action=raise:ENOSPC")
    last = pl.callbacks.ModelCheckpoint(tmp_path / "files", save_last=True)
    with pytest.raises(CheckpointError, match="No space left"):
        trainer(tmp_path, callbacks=[last], plugins=[BackgroundCheckpointIO("async_temporal")]).fit(Line())
    overrides = ["checkpoint.save.every_steps=null"]
    with pytest.raises(CheckpointError, match="No space left"):
        trainer(tmp_path, callbacks=[CheckpointCallback(overrides=overrides, dir=tmp_path / "ours")]).fit(Line())


def test_an_error_of_training_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Line):
        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            if number == 3:
                raise ZeroDivisionError("of the user")
            return super().training_step(batch, number)

    monkeypatch.setenv("CKPT_FAILPOINT_LOG", str(tmp_path / "operations"))
    monkeypatch.setenv("CKPT_FAILPOINT", "write:process=writer:action=raise:EIO")
    callbacks = [
        every_step(tmp_path / "files", train_time_interval=None),
        CheckpointCallback(overrides=["checkpoint.save.every_steps=3"], dir=tmp_path / "ours"),
    ]
    with pytest.raises((ZeroDivisionError, CheckpointError)) as raised:
        trainer(tmp_path, callbacks=callbacks[1:]).fit(Broken())
    assert raised.type is ZeroDivisionError


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: CheckpointCallback("async_persistant"), "async_persistent"),
        (lambda: CheckpointCallback(overrides=["checkpoint.save.every_step=3"]), "every_steps"),
        (lambda: CheckpointCallback(overrides="checkpoint.save.every_steps=3"), "must be a list"),
        (lambda: CheckpointCallback(monitor="loss", mode="least"), "min"),
        (lambda: BackgroundCheckpointIO("async_persistant"), "async_persistent"),
        (lambda: BackgroundCheckpointIO("async_zero_overhead"), "'async_persistent'"),
        (lambda: BackgroundCheckpointIO("off"), "saves nothing"),
        (lambda: BackgroundCheckpointIO(overrides=["checkpoint.save.every_steps=3"]), "every_n_train_steps"),
        (lambda: BackgroundCheckpointIO(overrides=["checkpoint/writer=dcp"]), "has no effect"),
        (lambda: BackgroundCheckpointIO(overrides=["checkpoint.writer.worker=3"]), "workers"),
    ],
    ids=itertools.count(),
)
def test_a_wrong_argument_is_refused_at_once(build: Callable[[], object], text: str) -> None:
    with pytest.raises(CheckpointConfigError, match=text) as raised:
        build()
    assert str(raised.value).count(". ") < 2


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("dirpath", "has no argument dirpath: use dir="),
        ("every_n_train_steps", "checkpoint.save.every_steps"),
        ("save_top_k", "checkpoint.keep.best.last"),
        ("monitr", "did you mean monitor?"),
        ("x", "there are checkpoint, overrides, dir,"),
    ],
)
def test_an_argument_of_modelcheckpoint_is_refused_with_ours(argument: str, text: str) -> None:
    with pytest.raises(CheckpointTypeError, match=text):
        CheckpointCallback(**dict[str, Any]({argument: 1}))


def test_wrong_use_of_a_built_one_is_refused(tmp_path: Path) -> None:
    plugin = BackgroundCheckpointIO()
    try:
        with pytest.raises(CheckpointTypeError, match="leave it out"):
            plugin.save_checkpoint({}, tmp_path / "x.ckpt", storage_options={"a": 1})
        with pytest.raises(CheckpointConfigError, match="s3://bucket/x.ckpt is to be a single file"):
            plugin.save_checkpoint({}, "s3://bucket/x.ckpt")
        with pytest.raises(CheckpointError, match="cannot be pickled"):
            plugin.save_checkpoint({"a": lambda: None}, tmp_path / "x.ckpt")
    finally:
        plugin.teardown()
    with pytest.raises(CheckpointConfigError, match="FSDPStrategy shards it"):
        fake = type("Trainer", (), {"strategy": pl.strategies.FSDPStrategy.__new__(pl.strategies.FSDPStrategy)})
        CheckpointCallback(dir=tmp_path).on_fit_start(fake, None)


@pytest.mark.slow
@pytest.mark.turns(2)
def test_the_example_resumes_to_the_same_loss(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "lightning_loop.py"
    if not script.is_file():
        pytest.skip("needs the checkout, which has the example")
    whole = run_program([str(script), "--steps=60"], tmp_path).stdout
    shutil.rmtree(tmp_path / "runs" / "lightning" / "iter_0000060")
    again = run_program([str(script), "--steps=60"], tmp_path).stdout
    [ending] = re.findall(r"^step 60: loss [\d.]+$", whole, re.MULTILINE)
    assert "Continuing after step 50 from" in again
    assert ending in again
