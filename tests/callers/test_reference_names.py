"""Names of NVRx beside the queue and the writer: the reader that caches metadata, the results queue, the warm process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ckpt_component import (
    AsyncCallsQueue,
    AsyncRequest,
    CheckpointConfigError,
    FileSystemWriterAsync,
    PersistentAsyncCaller,
    TemporalAsyncCaller,
)
from ckpt_component.compat import CachedMetadataFileSystemReader, get_write_results_queue
from ckpt_component.compat.file_system_writer_async import _results_queue, log_once

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


def save(folder: Path, size: int) -> None:
    dcp.save({"weight": torch.zeros(size)}, checkpoint_id=folder, no_dist=True)


def size_in(folder: Path, cached: bool = True) -> int:
    metadata = CachedMetadataFileSystemReader(folder, cache_metadata=cached).read_metadata()
    weight = metadata.state_dict_metadata["weight"]
    assert isinstance(weight, TensorStorageMetadata)
    return weight.size[0]


def test_metadata_is_read_once_until_the_folder_is_saved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    original = FileSystemReader.read_metadata

    def read_metadata(reader: FileSystemReader) -> Metadata:
        reads.append(str(reader.path))
        return original(reader)

    monkeypatch.setattr(FileSystemReader, "read_metadata", read_metadata)
    save(tmp_path / "one", 3)
    save(tmp_path / "two", 4)
    assert [size_in(tmp_path / name) for name in ("one", "two", "one", "two")] == [3, 4, 3, 4]
    assert len(reads) == 2
    save(tmp_path / "one", 5)
    assert size_in(tmp_path / "one") == 5 and len(reads) == 3
    assert size_in(tmp_path / "one", cached=False) == 5 and len(reads) == 4
    CachedMetadataFileSystemReader.clear_metadata_cache(tmp_path / "one")
    assert size_in(tmp_path / "one") == 5 and len(reads) == 5


def test_a_folder_without_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        CachedMetadataFileSystemReader(tmp_path).read_metadata()


def test_the_results_queue_has_no_process() -> None:
    assert get_write_results_queue(mp_mode="fork").empty() and _results_queue is None


def test_a_priority_out_of_range_is_refused() -> None:
    with pytest.raises(CheckpointConfigError, match="from 0 to 19"):
        AsyncCallsQueue(persistent=True, cpu_priority=20)


#: Options of NVRx that docs/megatron.md lists without an effect, with a value other than the default.
OF_QUEUE: dict[str, Any] = {"is_daemon": False, "sigterm_timeout": 1.0, "cpu_shm_mode": True}
OF_WARM_UP: dict[str, Any] = {**OF_QUEUE, "otel_bootstrap": print}
OF_WRITER: dict[str, Any] = {
    **dict.fromkeys(("is_multiproc_io", "use_cached_data_structure", "use_cpu_shm_for_gpu_tensors"), True),
    "open_file": os.fdopen,
}


def test_options_without_an_effect_are_accepted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    docs = (Path(__file__).parents[2] / "docs" / "megatron.md").read_text()
    listed = docs[docs.index("- `is_daemon`") : docs.index("- An error names")]
    places = {"AsyncCallsQueue", "warmup_persistent_caller", "FileSystemWriterAsync"}
    assert {*re.findall(r"`(\w+)`", listed)} - places == {*OF_WARM_UP, *OF_WRITER}
    AsyncCallsQueue.warmup_persistent_caller(0, **OF_WARM_UP)
    calls = AsyncCallsQueue(persistent=True, **OF_QUEUE)
    assert calls.schedule_async_request(AsyncRequest(os.getpid)) == 0
    calls.close()
    log_once.cache_clear()
    for _ in range(2):
        FileSystemWriterAsync(tmp_path, **OF_WRITER)
    assert [name for text in caplog.messages for name in OF_WRITER if f"({name}=...) does nothing" in text] == [
        *OF_WRITER
    ]


def test_a_warm_process_that_no_queue_used_ends_with_the_next_close() -> None:
    import psutil

    before = {*psutil.Process().children()}
    AsyncCallsQueue.warmup_persistent_caller(0)
    AsyncCallsQueue.warmup_persistent_caller(0)
    (worker,) = {
        child for child in {*psutil.Process().children()} - before if "resource_tracker" not in str(child.cmdline())
    }
    AsyncCallsQueue(persistent=True).close()
    assert not worker.is_running()


@pytest.mark.parametrize("import_main", [True, False])
def test_a_process_may_leave_the_main_script_alone(import_main: bool, tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "import os, sys\n"
        "open(sys.argv[1], 'a').write(f'{__name__}\\n')\n"
        "from ckpt_component import AsyncCallsQueue, AsyncRequest\n"
        "if __name__ == '__main__':\n"
        f"    calls = AsyncCallsQueue(persistent=True, import_main={import_main}, start_timeout=90.0)\n"
        "    calls.schedule_async_request(AsyncRequest(os.getpid))\n"
        "    calls.close()\n"
        "    assert __spec__ is None\n"
    )
    imports = tmp_path / "imports"
    subprocess.run([sys.executable, script, imports], check=True, timeout=100, env={**os.environ})
    assert imports.read_text().split() == (["__main__", "__mp_main__"] if import_main else ["__main__"])


def test_requests_of_a_queue_keep_their_order_after_a_warm_start() -> None:
    AsyncCallsQueue.warmup_persistent_caller(0, cpu_priority=5)
    calls = AsyncCallsQueue(persistent=True)
    assert [calls.schedule_async_request(AsyncRequest(os.getpid)) for _ in range(2)] == [0, 1]
    assert calls.maybe_finalize_async_calls(blocking=True) == [0, 1]
    calls.close()


def test_a_queue_shows_its_caller() -> None:
    assert isinstance(AsyncCallsQueue()._get_async_caller(), TemporalAsyncCaller)
    AsyncCallsQueue.warmup_persistent_caller(0)
    calls = AsyncCallsQueue(persistent=True)
    caller = calls._get_async_caller()
    assert isinstance(caller, PersistentAsyncCaller) and caller.pid is not None
    calls.schedule_async_request(AsyncRequest(os.getpid))
    assert calls._get_async_caller() is caller is calls.async_calls[0].async_caller
    calls.close(abort=True)
    assert calls._get_async_caller() is caller and caller.pid is None
