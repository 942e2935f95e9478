"""The listeners for TensorBoard, W&B, MLflow and OpenTelemetry, each with the real package where it is installed."""

from __future__ import annotations

import importlib
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_component import build_manager
from ckpt_component.config.hydra.parts import LISTENERS
from ckpt_component.errors import CheckpointConfigError
from ckpt_component.events import SaveReport
from ckpt_component.events.listener import Tracker

QUICK = ("checkpoint.writer.io=buffered", "checkpoint.durability=process_crash", "checkpoint.save.at_end=false")
FIGURES = ("stall_s", "lost_s", "staged_s", "durable_s", "gbps", "bytes", "reused", "attempts")
LOGGED = {f"checkpoint/{name}" for name in FIGURES}


def trained(root: Path, *overrides: str, listener: Any = None) -> None:
    """Saves steps 1 and 2, fails to save step 3, and restores step 2."""
    with build_manager("sync", [*QUICK, "checkpoint.on_error=warn", *overrides], dir=root) as manager:
        if listener is not None:
            manager.add_listener(listener)
        for step in (1, 2):
            manager.save(step, {"step": step})
        manager.save(3, {"lambda": lambda: None})
        manager.restore({"step": 0})


@pytest.mark.parametrize("name", LISTENERS)
def test_a_missing_package_is_one_line_on_what_to_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name if name != "opentelemetry" else "opentelemetry.trace", None)
    with pytest.raises(CheckpointConfigError, match=f"needs {name}.*: pip install {name}") as caught:
        build_manager("sync", [f"checkpoint.listeners=[{name}]"], dir=tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("module", [target.rpartition(".")[0] for target in LISTENERS.values()])
def test_a_listener_is_imported_without_its_package(module: str) -> None:
    importlib.import_module(module)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("overrides", [("checkpoint.listeners=[tensorboard]",), ()])
def test_tensorboard(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    from ckpt_component.events.tensorboard import TensorBoardListener

    writer = None if overrides else SummaryWriter(str(tmp_path / "events"))
    trained(tmp_path, *overrides, listener=writer and TensorBoardListener(writer=writer))
    log = EventAccumulator(str(tmp_path / "events"))
    log.Reload()
    assert {*log.Tags()["scalars"]} == {
        *LOGGED,
        "checkpoint/failed",
        "checkpoint/restore_s",
        "checkpoint/restored_step",
    }
    assert [event.step for event in log.Scalars("checkpoint/stall_s")] == [1, 2]
    assert [event.step for event in log.Scalars("checkpoint/failed")] == [3]
    if writer is not None:
        writer.add_scalar("mine", 1.0)  # it is still open
        writer.close()


def records_in(log: bytes) -> Iterator[bytes]:
    """The records of an offline run: LevelDB's log format, whose blocks of 32 KiB begin with one header of 7 bytes."""
    position, record = 7, b""
    while position + 7 <= len(log):
        if (1 << 15) - position % (1 << 15) < 7:
            position += (1 << 15) - position % (1 << 15)
        _, length, kind = struct.unpack_from("<IHB", log, position)
        record += log[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    from wandb.proto import wandb_internal_pb2

    for key in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(key, str(tmp_path / "wandb"))
    (tmp_path / "wandb").mkdir()
    run = wandb.init(
        mode="offline", project="x", dir=str(tmp_path / "wandb"), settings=wandb.Settings(console="off", silent=True)
    )
    run.log({"loss": 1.0}, step=1)
    trained(tmp_path, "checkpoint.listeners=[wandb]")
    run.log({"loss": 2.0}, step=2)
    run.finish()
    wandb.teardown()
    (file,) = (tmp_path / "wandb").rglob("*.wandb")
    rows, metrics = [], []
    for data in records_in(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
        elif record.WhichOneof("record_type") == "metric":
            metrics.append((record.metric.name or record.metric.glob_name, record.metric.step_metric))
    assert ("checkpoint/*", "checkpoint/step") in metrics
    logged = {key: value for row in rows for key, value in row.items()}
    assert (
        logged.keys() >= {*LOGGED, "checkpoint/failed", "checkpoint/step", "checkpoint/restore_s"}
        and logged["loss"] == 2.0
    )
    assert {row["_step"] for row in rows} <= {1, 2}, "the script's own steps are not advanced"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as run:
        trained(tmp_path, "checkpoint.listeners=[mlflow]")
    client = mlflow.MlflowClient()
    assert client.get_run(run.info.run_id).data.metrics.keys() >= {*LOGGED, "checkpoint/failed", "checkpoint/restore_s"}
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "checkpoint/stall_s")] == [1, 2]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_without_a_run_one_line_says_what_to_call(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed")
    trained(tmp_path, f"checkpoint.listeners=[{name}]")
    assert sum("no run is active" in record.getMessage() for record in caplog.records) == 1


def test_opentelemetry(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from ckpt_component.events.opentelemetry import OpenTelemetryListener

    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with provider.get_tracer("test").start_as_current_span("training") as training:
        trained(tmp_path, listener=OpenTelemetryListener(provider))
    provider.shutdown()
    spans = exporter.get_finished_spans()
    saves = [span for span in spans if span.name == "checkpoint.save"]
    assert [(span.attributes["checkpoint.step"], span.status.is_ok) for span in saves] == [
        (1, True),
        (2, True),
        (3, False),
    ]
    assert all(span.parent.span_id == training.get_span_context().span_id for span in saves)
    phases = [span for span in spans if span.parent is not None and span.parent.span_id == saves[0].context.span_id]
    assert [span.name.rpartition(".")[2] for span in phases] == [
        "plan",
        "stage",
        "queue",
        "write",
        "sync",
        "vote",
        "commit",
    ]
    assert all(saves[0].start_time <= span.start_time <= span.end_time <= saves[0].end_time for span in phases)
    (load,) = [span for span in spans if span.name == "checkpoint.load"]
    assert load.attributes["checkpoint.verified"] and load.attributes["checkpoint.step"] == 2


def test_trackers_have_names_of_their_own_for_snapshots_in_memory() -> None:
    """Otherwise the figures of a save that writes nothing would be taken for those of the disk."""

    class Noted(Tracker):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[list[str]] = []

        def log(self, figures: dict[str, float], step: int, time: float, path: str) -> None:
            self.names.append([*figures])

    noted = Noted()
    noted.on_committed(SaveReport("host://runs/a@1f-0a/iter_1", step=1, memory=True))
    noted.on_failed(SaveReport("host://runs/a@1f-0a/iter_1", "failed", step=1, memory=True))
    noted.on_committed(SaveReport("runs/a/iter_2", step=2))
    assert noted.names == [
        [f"checkpoint/memory_{name}" for name in ("stall_s", "lost_s", "staged_s", "whole_s")],
        ["checkpoint/memory_failed"],
        [f"checkpoint/{name}" for name in FIGURES],
    ]
