"""`FileSystemWriterAsync`: its methods, what is on disk, and what happens when something goes wrong."""

from __future__ import annotations

import io
import os
import pickle
import queue
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from gated_fs import FullFs, GatedFs, MeetingFs
from torch.distributed.checkpoint.api import _is_wrapped_exception
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from ckpt_component.compat.async_queue import AsyncCallsQueue
from ckpt_component.compat.async_request import AsyncRequest
from ckpt_component.compat.file_system_writer_async import FileSystemWriterAsync
from ckpt_component.config.hydra.hydra_errors import CheckpointConfigError
from ckpt_component.errors import CheckpointSaveError, CheckpointStageError, WorkerDiedError

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*fork:DeprecationWarning", "ignore:torch.distributed is:UserWarning", "ignore:.*TypedStorage.*"
)


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "model": {
            "a": torch.randn(300, 7),
            "transposed": torch.randn(5, 6).t(),
            "view": torch.randn(1000)[10:20],
            "half": torch.randn(33).to(torch.bfloat16),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(3.5),
            "flag": torch.tensor([True, False, True]),
            "parameter": torch.nn.Parameter(torch.randn(4, 4)),
        },
        "step": 17,
        "names": ["x", "y"],
    }


def plan(writer: FileSystemWriterAsync, values: dict[str, Any]) -> Metadata:
    """What `save_state_dict_async_plan` does, on one rank, by torch alone."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(values, writer.storage_meta(), True)
    writer.set_up_storage_writer(True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    (central,) = writer.prepare_global_plan(plans)
    writer.prepare_write_data(planner.finish_plan(central), planner)
    return metadata


def finish(writer: FileSystemWriterAsync, metadata: Metadata) -> None:
    results = writer.retrieve_write_results()
    if _is_wrapped_exception(results):
        raise results[0]  # type: ignore[misc]
    writer.finish(metadata, [results])  # type: ignore[list-item]


def request_of(writer: FileSystemWriterAsync, metadata: Metadata) -> AsyncRequest:
    function, preload, args = writer.get_save_function_and_args()
    return AsyncRequest(function, args, [partial(finish, writer, metadata)], preload_fn=preload)


def save(path: Path, values: dict[str, Any], **options: Any) -> FileSystemWriterAsync:
    writer = FileSystemWriterAsync(path, **options)
    request_of(writer, plan(writer, values)).execute_sync()
    return writer


def load(path: Path, target: dict[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, storage_reader=FileSystemReader(path), no_dist=True)
    return target


def blank(values: dict[str, Any]) -> dict[str, Any]:
    model = {name: torch.zeros_like(value.detach()) for name, value in values["model"].items()}
    return {"model": model, "step": 0, "names": []}


def check(path: Path, values: dict[str, Any]) -> None:
    found = load(path, blank(values))
    for name, value in values["model"].items():
        assert torch.equal(found["model"][name], value.detach()), name
    assert found["step"] == values["step"] and found["names"] == values["names"]


@pytest.fixture
def queue_of() -> Iterator[Callable[..., AsyncCallsQueue]]:
    made: list[AsyncCallsQueue] = []

    def make(persistent: bool, start_method: str = "fork") -> AsyncCallsQueue:
        made.append(AsyncCallsQueue(persistent, start_method=start_method, start_timeout=60, write_timeout=60))
        return made[-1]

    yield make
    for found in made:
        found.close(abort=True)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_stock_dcp_loads_it_bit_for_bit(threads: int, tmp_path: Path) -> None:
    values = state()
    save(tmp_path / "ck", values, thread_count=threads)
    check(tmp_path / "ck", values)
    assert not list((tmp_path / "ck").glob("*.tmp"))
    assert len(list((tmp_path / "ck").glob("__0_*.distcp"))) == threads


def test_it_loads_here_too(tmp_path: Path) -> None:
    from ckpt_component import build_checkpointer

    values = state()
    save(tmp_path / "ck", values, thread_count=2)
    target = blank(values)
    with build_checkpointer("sync") as checkpointer:
        checkpointer.load(tmp_path / "ck", target)
    assert torch.equal(target["model"]["transposed"], values["model"]["transposed"]) and target["step"] == 17


def test_items_are_the_archives_of_torch_save(tmp_path: Path) -> None:
    writer = save(tmp_path / "ck", {"model": {"a": torch.arange(5.0)}, "step": 1, "names": []})
    metadata = FileSystemReader(tmp_path / "ck").read_metadata()
    for index, place in metadata.storage_data.items():
        with open(tmp_path / "ck" / place.relative_path, "rb") as stream:
            stream.seek(place.offset)
            archive = stream.read(place.length)
        if index.fqn == "model.a":
            assert torch.equal(torch.load(io.BytesIO(archive), weights_only=True), torch.arange(5.0))
    assert metadata.storage_meta is not None
    assert isinstance(metadata.storage_meta.checkpoint_id, str)
    assert metadata.storage_meta.save_id == writer.save_id


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_in_another_process_it_is_what_it_was_at_schedule(
    persistent: bool, start_method: str, queue_of: Callable[..., AsyncCallsQueue], tmp_path: Path
) -> None:
    values, calls = state(), queue_of(persistent, start_method)
    expected = []
    for number in range(3):
        gate = tmp_path / "gate"
        writer = FileSystemWriterAsync(tmp_path / str(number), thread_count=2, fs_ops=GatedFs(str(gate)))
        assert calls.schedule_async_request(request_of(writer, plan(writer, values))) == number
        expected.append({**values, "model": {name: value.detach().clone() for name, value in values["model"].items()}})
        for value in values["model"].values():
            value.data.copy_(value.data.bool().logical_not() if value.dtype == torch.bool else value.data + 1)
        values["step"] += 1
        values["names"] = [*values["names"], "z"]
    gate.touch()
    assert calls.maybe_finalize_async_calls(blocking=True) == [0, 1, 2]
    for number, then in enumerate(expected):
        check(tmp_path / str(number), then)
    assert not values["model"]["a"].is_shared()


def test_the_copy_travels_as_a_reference(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "ck", thread_count=2)
    plan(writer, {"model": {"a": torch.ones(1_000_000), "b": torch.ones(1_000_000)}})
    _, preload, _ = writer.get_save_function_and_args()
    assert preload is not None
    buckets = preload()
    assert len(pickle.dumps(buckets)) < 10_000


def test_a_save_that_was_given_up_cannot_be_written(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "ck")
    plan(writer, {"a": torch.ones(10)})
    _, preload, _ = writer.get_save_function_and_args()
    assert preload is not None
    late = pickle.dumps(preload())
    assert _is_wrapped_exception(writer.retrieve_write_results())  # gives the copy up
    with pytest.raises(CheckpointSaveError, match="given"):
        pickle.loads(late)


def test_without_preloading_it_copies_before_it_writes(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "ck", thread_count=2)
    values = state()
    metadata = plan(writer, values)
    function, _, args = writer.get_save_function_and_args()
    assert function is not None
    function(*args)
    finish(writer, metadata)
    check(tmp_path / "ck", values)


def test_all_buckets_are_written_at_the_same_time(tmp_path: Path) -> None:
    (tmp_path / "meeting").mkdir()
    values = {"model": {name: torch.ones(10_000) for name in "abcd"}, "step": 1, "names": []}
    save(tmp_path / "ck", values, thread_count=4, fs_ops=MeetingFs(str(tmp_path / "meeting"), 4))
    check(tmp_path / "ck", values)


@pytest.mark.parametrize(
    ("threads", "names"),
    [
        (2, {"__0_0", "model.__0_1"}),
        (3, {"__0_0", "model.__0_1", "model.__0_2"}),
        (4, {"__0_0", "__0_1", "model.__0_2", "model.__0_3"}),
    ],
)
def test_the_separation_hint_begins_the_names_of_files(threads: int, names: set[str], tmp_path: Path) -> None:
    size = 100 if threads != 3 else 50
    values = {f"model.{n}": torch.ones(100) for n in range(4)} | {f"optim.{n}": torch.ones(size) for n in range(4)}
    save(tmp_path / "ck", values, thread_count=threads, separation_hint="model.")
    assert {path.stem for path in (tmp_path / "ck").glob("*.distcp")} == names
    for index, place in FileSystemReader(tmp_path / "ck").read_metadata().storage_data.items():
        assert place.relative_path.startswith("model.") == index.fqn.startswith("model.")
    assert torch.equal(load(tmp_path / "ck", {"model.1": torch.zeros(100)})["model.1"], torch.ones(100))


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="single_file_per_rank"):
        FileSystemWriterAsync(tmp_path, single_file_per_rank=False)
    with pytest.raises(NotImplementedError, match="use_msc"):
        FileSystemWriterAsync(tmp_path, use_msc=True)
    with pytest.raises(CheckpointConfigError, match="at least two files; set thread_count=2"):
        FileSystemWriterAsync(tmp_path, separation_hint="model.")
    with pytest.raises(CheckpointConfigError, match="part of file names"):
        FileSystemWriterAsync(tmp_path, thread_count=2, separation_hint="../x")
    writer = FileSystemWriterAsync(tmp_path)
    with pytest.raises(RuntimeError, match="comes after prepare_write_data"):
        writer.retrieve_write_results()
    with pytest.raises(NotImplementedError, match="prepare_write_data"):
        writer.write_data(None, None)  # type: ignore[arg-type]
    with pytest.raises(CheckpointStageError, match="'m' is on the meta device"):
        plan(FileSystemWriterAsync(tmp_path / "ck"), {"m": torch.empty(3, device="meta")})


def test_a_rank_with_nothing_to_write(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "ck")
    metadata = plan(writer, {})
    assert writer.get_save_function_and_args() == (None, None, ())
    assert writer.retrieve_write_results() == []
    writer.finish(metadata, [[]])
    assert (tmp_path / "ck" / ".metadata").exists()


def test_files_are_named_by_rank_without_asking(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path)
    planner = DefaultSavePlanner()
    planner.set_up_planner({"a": torch.ones(1)}, None, True)
    assert writer.can_run_decentralized_global_plan
    assert writer.prepare_decentralized_global_plan(planner.create_local_plan()).storage_data.prefix == "__0_"


@pytest.mark.parametrize("start_method", ["here", "fork", "spawn"])
def test_an_error_of_a_bucket_is_a_result(
    start_method: str, queue_of: Callable[..., AsyncCallsQueue], tmp_path: Path
) -> None:
    values = {f"model.{n}": torch.ones(10) for n in range(2)} | {"optim.0": torch.ones(10)}
    options: dict[str, Any] = {"thread_count": 2, "separation_hint": "model."}
    writer = FileSystemWriterAsync(tmp_path / "ck", fs_ops=FullFs("model."), **options)
    request = request_of(writer, plan(writer, values))._replace(finalize_fns=[])
    if start_method == "here":
        request.execute_sync()
    else:
        calls = queue_of(False, start_method)
        calls.schedule_async_request(request)
        assert calls.maybe_finalize_async_calls(blocking=True) == [0]
    found: Any = writer.retrieve_write_results()
    assert _is_wrapped_exception(found)
    assert isinstance(found[0], CheckpointSaveError) and found[0].errno == 28
    assert "No space left" in str(found[0])
    assert any(frame.filename.endswith("gated_fs.py") for frame in found[1])
    pickle.dumps(found)  # it goes to the other ranks
    assert os.listdir(tmp_path / "ck") == []  # the other bucket was not published either


@pytest.mark.parametrize("persistent", [True, False])
def test_a_process_killed_at_work_is_an_error_and_no_hang(
    persistent: bool, queue_of: Callable[..., AsyncCallsQueue], tmp_path: Path
) -> None:
    gate, calls = tmp_path / "gate", queue_of(persistent)
    writer = FileSystemWriterAsync(tmp_path / "ck", fs_ops=GatedFs(str(gate)))
    calls.schedule_async_request(request_of(writer, plan(writer, {"a": torch.ones(10)})))
    os.kill(pid_of(gate), signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        calls.maybe_finalize_async_calls(blocking=True)
    found: Any = writer.retrieve_write_results()
    assert _is_wrapped_exception(found) and "no results" in str(found[0])
    assert not (tmp_path / "ck" / ".metadata").exists()
    again = FileSystemWriterAsync(tmp_path / "ck")
    calls.schedule_async_request(request_of(again, plan(again, {"a": torch.ones(10)})))
    assert calls.maybe_finalize_async_calls(blocking=True) == [1]
    assert torch.equal(load(tmp_path / "ck", {"a": torch.zeros(10)})["a"], torch.ones(10))


def test_results_of_an_aborted_save_feed_no_other(queue_of: Callable[..., AsyncCallsQueue], tmp_path: Path) -> None:
    calls, gate = queue_of(True), tmp_path / "gate"
    first = FileSystemWriterAsync(tmp_path / "a", fs_ops=GatedFs(str(gate)))
    calls.schedule_async_request(request_of(first, plan(first, {"x": torch.ones(4)})))
    pid_of(gate)
    calls.close(abort=True)
    second = FileSystemWriterAsync(tmp_path / "b")
    calls.schedule_async_request(request_of(second, plan(second, {"x": torch.ones(4), "y": torch.ones(4)})))
    assert calls.maybe_finalize_async_calls(blocking=True) == [1]
    assert torch.equal(load(tmp_path / "b", {"y": torch.zeros(4)})["y"], torch.ones(4))
    assert not (tmp_path / "a" / ".metadata").exists()


def test_an_earlier_checkpoint_is_never_mixed_with_a_new_one(tmp_path: Path) -> None:
    save(tmp_path / "ck", {"model.a": torch.ones(4), "optim.a": torch.ones(4)}, thread_count=2)
    before = {path.name: path.read_bytes() for path in (tmp_path / "ck").iterdir()}
    values = {"model.a": torch.full((4,), 2.0), "optim.a": torch.full((4,), 2.0)}
    with pytest.warns(UserWarning, match="existing checkpoint"), pytest.raises(CheckpointSaveError, match="No space"):
        save(tmp_path / "ck", values, thread_count=2, fs_ops=FullFs("__0_1"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "ck").iterdir()} == before
    writer = FileSystemWriterAsync(tmp_path / "ck", thread_count=2)
    with pytest.warns(UserWarning, match="existing checkpoint"):
        metadata = plan(writer, values)
    function, _, args = writer.get_save_function_and_args()
    assert function is not None
    function(*args)
    assert not (tmp_path / "ck" / ".metadata").exists()  # new files, so what is old is none any more
    finish(writer, metadata)
    assert torch.equal(load(tmp_path / "ck", {"optim.a": torch.zeros(4)})["optim.a"], torch.full((4,), 2.0))


def test_metadata_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "ck", fs_ops=FullFs(".metadata"))
    metadata = plan(writer, {"a": torch.ones(3)})
    function, _, args = writer.get_save_function_and_args()
    assert function is not None
    function(*args)
    with pytest.raises(OSError, match="No space"):
        finish(writer, metadata)
    assert metadata.storage_data is None  # not changed
    assert [path.name for path in (tmp_path / "ck").iterdir()] == ["__0_0.distcp"]


def test_one_bucket_by_the_queues_of_the_reference(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "ck")
    plan(writer, {"a": torch.ones(3)})
    (bucket,) = FileSystemWriterAsync.preload_tensors(writer.write_buckets or [], True)
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    counts: queue.Queue[int] = queue.Queue()
    counts.put(0)
    FileSystemWriterAsync.write_preloaded_data([], 0, bucket, results, counts, True)
    counts.join()
    number, places = results.get_nowait()
    assert number == 0 and places == [(0, (tmp_path / "ck" / "__0_0.distcp").stat().st_size)]


def test_the_descriptors_of_a_save_are_given_back(tmp_path: Path) -> None:
    save(tmp_path / "first", {"a": torch.ones(3)})
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for number in range(5):
        save(tmp_path / str(number), {"a": torch.ones(3)})
    assert len(os.listdir("/proc/self/fd")) <= before
    assert threading.active_count() <= threads


def pid_of(gate: Path) -> int:
    path, deadline = Path(f"{gate}.pid"), time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, "nothing was written"
        time.sleep(0.01)
    return int(path.read_text())
