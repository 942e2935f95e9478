"""Plan and finalize around `FileSystemWriterAsync`, and the plan cache."""

from __future__ import annotations

import io
import pickle
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from gated_fs import FullFs
from ranks import run_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ckpt_component.compat import bucket_io
from ckpt_component.compat.file_system_writer_async import FileSystemWriterAsync, log_once
from ckpt_component.compat.state_dict_saver import (
    CheckpointMetadataCache,
    fingerprint_of,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from ckpt_component.config.hydra.hydra_errors import CheckpointConfigError
from ckpt_component.core.image.arena import Arena
from ckpt_component.errors import CheckpointError, CheckpointSaveError, CheckpointStageError, RanksError

SCRIPT = Path(__file__).parent / "scripts" / "async_plan.py"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


class CountedPlanner(DefaultSavePlanner):
    """Counts the global plans it made."""

    made = 0

    def create_global_plan(self, all_plans: Any) -> Any:
        type(self).made += 1
        return super().create_global_plan(all_plans)


@pytest.fixture
def planners() -> type[CountedPlanner]:
    CountedPlanner.made = 0
    return CountedPlanner


def save(path: Path, values: dict[str, Any], cache: CheckpointMetadataCache | None = None, **options: Any) -> None:
    planner = options.pop("planner", None)
    writer = FileSystemWriterAsync(path, **options)
    planned = save_state_dict_async_plan(values, writer, planner=planner, metadata_cache=cache)
    function, preload, args = writer.get_save_function_and_args()
    assert function is not None and preload is not None
    function(args[0], preload(), *args[2:])
    save_state_dict_async_finalize(*planned)


def load(path: Path, target: dict[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, checkpoint_id=path, no_dist=True)
    return target


def test_one_rank_saves_and_stock_dcp_loads(tmp_path: Path) -> None:
    values: dict[str, Any] = {"a": torch.randn(5, 5).t(), "nested": {"b": torch.ones(2, dtype=torch.int8)}, "step": 3}
    save(tmp_path / "ck", values, thread_count=2)
    found = load(
        tmp_path / "ck", {"a": torch.zeros(5, 5), "nested": {"b": torch.zeros(2, dtype=torch.int8)}, "step": 0}
    )
    assert torch.equal(found["a"], values["a"])
    assert torch.equal(found["nested"]["b"], torch.ones(2, dtype=torch.int8)) and found["step"] == 3


def test_a_known_structure_is_not_planned_again(planners: type[CountedPlanner], tmp_path: Path) -> None:
    cache = CheckpointMetadataCache()
    for number in range(3):
        strided = torch.full((4 * (number + 1),), float(number))[:: number + 1]
        save(tmp_path / str(number), {"a": strided, "n": number}, cache, planner=planners())
        found = load(tmp_path / str(number), {"a": torch.zeros(4), "n": -1})
        assert torch.equal(found["a"], torch.full((4,), float(number))) and found["n"] == number
    assert planners.made == 1


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"a": torch.ones(4), "new": torch.ones(2)}, id="key"),
        pytest.param({"a": torch.ones(9)}, id="size"),
        pytest.param({"a": torch.ones(4, dtype=torch.float64)}, id="dtype"),
        pytest.param({"a": torch.ones(2, 2)}, id="shape"),
        pytest.param({"a": 3}, id="kind"),
        pytest.param({"a": torch.ones(4), "n": 1}, id="object"),
        pytest.param({"b": torch.ones(4)}, id="name"),
    ],
)
def test_a_changed_structure_is_noticed(
    changed: dict[str, Any], planners: type[CountedPlanner], tmp_path: Path
) -> None:
    cache = CheckpointMetadataCache()
    save(tmp_path / "0", {"a": torch.zeros(4)}, cache, planner=planners())
    save(tmp_path / "1", changed, cache, planner=planners())
    assert planners.made == 2
    found = load(
        tmp_path / "1",
        {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for key, value in changed.items()},
    )
    for key, value in changed.items():
        assert torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value


def test_keys_that_flatten_alike_are_different() -> None:
    def fingerprint(values: dict[str, Any], world_size: int = 1) -> str:
        planner = DefaultSavePlanner()
        planner.set_up_planner(values, None, True)
        return fingerprint_of(planner.create_local_plan(), planner, world_size)

    flat, nested = {"a.b": torch.ones(2)}, {"a": {"b": torch.ones(2)}}
    assert fingerprint(flat) != fingerprint(nested)
    assert fingerprint(flat) == fingerprint({"a.b": torch.zeros(2)})
    assert fingerprint(flat) != fingerprint(flat, 2)
    assert len(bytes.fromhex(fingerprint(flat))) == 8


def test_without_a_cache_object_nothing_is_kept(planners: type[CountedPlanner], tmp_path: Path) -> None:
    for number in range(2):
        writer = FileSystemWriterAsync(tmp_path / str(number))
        save_state_dict_async_plan({"a": torch.ones(3)}, writer, planner=planners(), enable_cache=True)
    assert planners.made == 2


def test_saves_of_a_series_use_the_same_memory_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    arena = Arena

    def counted(nbytes: int, **how: Any) -> Any:
        made.append(nbytes)
        return arena(nbytes, **how)

    monkeypatch.setattr(bucket_io, "Arena", counted)
    cache = CheckpointMetadataCache()
    for number, text in enumerate(["a", "bb", "c" * 500, "d"]):  # objects change their length
        values: dict[str, Any] = {
            "a": torch.full((100_000,), float(number)),
            "b": torch.ones(3, 3) * number,
            "text": text,
        }
        save(tmp_path / str(number), values, cache, thread_count=2)
        found = load(tmp_path / str(number), {"a": torch.zeros(100_000), "b": torch.zeros(3, 3), "text": ""})
        assert torch.equal(found["a"], values["a"]) and torch.equal(found["b"], values["b"]) and found["text"] == text
    assert len(made) == 1
    pending = FileSystemWriterAsync(tmp_path / "pending")
    save_state_dict_async_plan({"a": torch.zeros(100_000)}, pending, metadata_cache=cache)
    function, preload, args = pending.get_save_function_and_args()
    assert function is not None and preload is not None
    buckets = preload()
    assert len(made) == 2  # another structure
    save(tmp_path / "next", {"a": torch.ones(100_000)}, cache)
    assert len(made) == 3  # the save before is not done yet
    function(args[0], buckets, *args[2:])
    assert not isinstance(pending.retrieve_write_results(), tuple)
    stored = (tmp_path / "pending" / "__0_0.distcp").read_bytes()
    assert torch.load(io.BytesIO(stored), weights_only=True).count_nonzero() == 0


def test_errors_are_torchs_checkpoint_exception_too(tmp_path: Path) -> None:
    failures: list[tuple[dict[str, Any], dict[str, Any], type[CheckpointError]]] = [
        ({"m": torch.empty(1, device="meta")}, {}, CheckpointStageError),
        ({"m": torch.ones(1)}, {"fs_ops": FullFs("distcp")}, CheckpointSaveError),
        ({"m": torch.ones(1)}, {"fs_ops": FullFs(".metadata")}, RanksError),
    ]
    for values, options, kind in failures:
        with pytest.raises(CheckpointException) as caught:
            save(tmp_path / "a", values, **options)
        assert isinstance(caught.value, kind)
        [(rank, (error, frames))] = caught.value.failures.items()
        assert rank == 0 and isinstance(error, CheckpointError) and isinstance(frames, traceback.StackSummary)
        assert str(error) in str(caught.value) and "CheckpointException" not in str(caught.value)
        assert type(pickle.loads(pickle.dumps(caught.value))) is kind


def test_options_that_do_nothing_say_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    asked: dict[str, Any] = {
        "is_multiproc_io": True,
        "use_cached_data_structure": True,
        "use_cpu_shm_for_gpu_tensors": True,
    }
    for _ in range(2):
        writer = FileSystemWriterAsync(tmp_path, **asked)
        save_state_dict_async_plan({"a": 1}, writer, enable_cache=True)
    assert len(caplog.messages) == 4 and all(any(name in text for text in caplog.messages) for name in asked)
    assert "metadata_cache=CheckpointMetadataCache()" in caplog.messages[-1]
    caplog.clear()
    log_once.cache_clear()
    cache = CheckpointMetadataCache()
    save_state_dict_async_plan({}, FileSystemWriterAsync(tmp_path), enable_cache=True, metadata_cache=cache)
    assert caplog.messages == []


def test_errors_of_one_rank_alone(tmp_path: Path) -> None:
    with pytest.raises(CheckpointStageError, match="'m' is on the meta device"):
        save(tmp_path / "a", {"m": torch.empty(1, device="meta")})
    with pytest.raises(CheckpointSaveError, match="No space left") as caught:
        save(tmp_path / "b", {"m": torch.ones(1)}, fs_ops=FullFs("distcp"))
    assert caught.value.errno == 28
    with pytest.raises(RanksError, match="No space left") as caught:
        save(tmp_path / "c", {"m": torch.ones(1)}, fs_ops=FullFs(".metadata"))
    assert caught.value.errno == 28 and list(caught.value.failures) == [0]
    with pytest.raises(CheckpointConfigError, match="coordinator_rank=1"):
        save_state_dict_async_plan({}, FileSystemWriterAsync(tmp_path), coordinator_rank=1)


@pytest.mark.slow
@pytest.mark.parametrize("function", ["in_the_background", "one_after_the_other", "other_ranks"])
def test_two_ranks(function: str, tmp_path: Path) -> None:
    run_ranks(SCRIPT, function, 2, tmp_path)
