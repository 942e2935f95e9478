"""What a row measures, in this process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_bench.measure.beside import RawSaves, measure_loads
from ckpt_bench.measure.limits import checksums, measure_limits
from ckpt_bench.measure.loop_clock import LoopClock, LoopTime
from ckpt_bench.measure.memory import pss, pss_of_tree, sampled_peak
from ckpt_bench.measure.row import RowSettings, make_saver, measure_row
from ckpt_bench.measure.saver import Saver
from ckpt_bench.measure.states import STATES, State, make_state, nbytes_of
from ckpt_bench.measure.target_files import drop_cache, files_of, fill_cache, sync_tree
from ckpt_bench.measure.training_loop import Cycle, Loop, compared, in_turn
from ckpt_bench.schema import STATES as STATES_OF_THE_CONFIG

QUICK = RowSettings(saves=1, enough_seconds=1, loop_threads=1, step_seconds=0.001, tail_seconds=0, pairs=2, cold=True)


def all_of(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures that a measurement yields part by part."""
    return {name: value for part in parts for name, value in part.items()}


def shapes(name: str) -> list[tuple[int, int]]:
    """Elements and bytes of a state's tensors, without making them."""
    found = []
    for _, shape, dtype in STATES[name]():
        count = torch.Size(shape).numel()
        found.append((count, count * dtype.itemsize))
    return found


def test_the_states_are_what_their_names_promise() -> None:
    assert set(STATES) == set(STATES_OF_THE_CONFIG)
    large = shapes("large")
    assert len(large) == 592 and 1.49e9 < sum(size for _, size in large) < 1.5e9
    small = shapes("many_small")
    assert len(small) == 20_000 and min(s for _, s in small) >= 1024 and max(s for _, s in small) <= 64 * 1024
    assert len(shapes("moe")) == 10_000
    assert {dtype for *_, dtype in STATES["bf16_mixed"]()} == {torch.bfloat16, torch.float32}
    for name in STATES:
        keys = [key for key, *_ in STATES[name]()]
        assert len(set(keys)) == len(keys)


def test_a_state_is_the_same_every_time_and_counts_exactly() -> None:
    one, two = make_state("tiny"), make_state("tiny")
    assert nbytes_of(one) == sum(size for _, size in shapes("tiny"))
    assert all(torch.equal(one[key], two[key]) for key in one) and any(value.any() for value in one.values())
    total, most = nbytes_of(one), max(value.nbytes for value in one.values())
    for nbytes in (total // 2, 3 * total):
        assert nbytes <= nbytes_of(make_state("tiny", nbytes)) < nbytes + most
    with pytest.raises(ValueError, match="use large"):
        make_state("huge")


class _Remembers(Saver):
    """Keeps the state in a list: a clone, or the tensors themselves, which the next update changes."""

    def __init__(self, state: State, torn: bool) -> None:
        super().__init__(state)
        self._torn, self._polls = torn, 0
        self.kept: State = {}

    def save(self, path: str) -> None:
        Path(path).write_bytes(b"x" * 10)
        self.kept = {key: value if self._torn else value.clone() for key, value in self.state.items()}
        self._polls = 0

    def poll(self) -> bool:
        self._polls += 1
        return self._polls > 4

    def load(self, path: str, target: State) -> None:
        for key, value in target.items():
            value.copy_(self.kept[key])


@pytest.mark.parametrize("torn", [False, True])
def test_a_row_tells_whether_its_snapshot_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bool) -> None:
    state = make_state("tiny")
    monkeypatch.setattr("ckpt_bench.measure.row.make_saver", lambda name, state: _Remembers(state, torn))
    found = all_of(measure_row("torch_save", state, str(tmp_path), QUICK))
    assert found["torn"] == (len(state) if torn else 0)
    assert found["files"] == 1 and found["bytes"] == 10 and found["state_bytes"] == nbytes_of(state)
    assert found["step_ratio"] > 0 and found["durable"] >= found["complete"] >= found["staged"] >= found["stall"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_loop_counts_the_time_that_a_save_takes_from_it(tmp_path: Path) -> None:
    state = make_state("tiny")
    loop = Loop(state, threads=1, step_s=0.001)

    class Spins(_Remembers):
        def __init__(self) -> None:
            super().__init__(state, torn=False)
            self.spent: list[float] = []

        def save(self, path: str) -> None:
            self.spent.append(loop.cycle(50).time.cpu_s)
            super().save(path)

    saver = Spins()
    path, found = in_turn(loop, saver, str(tmp_path), iter(range(3)), 0, lambda path: Path(path).unlink())
    assert path.endswith("beside-2") and [each.name for each in tmp_path.iterdir()] == ["beside-2"]
    # What the save did on the loop's thread is lost, on the wall and of its CPU time; the steps beside it are not. Half,
    # because other processes are at work too.
    lost = sorted(each.lost_cpu_s for each in found)[1]
    assert min(saver.spent) / 2 < lost < 2 * max(saver.spent)
    assert max(each.lost_s for each in found) > min(saver.spent) / 2


def test_a_save_is_compared_with_the_cycles_next_to_it() -> None:
    quiet = Cycle(LoopTime(1.0, 0.9, 0.05), [0.1] * 10), Cycle(LoopTime(1.4, 1.1, 0.15), [0.1] * 10)
    # Two steps more than the others, because the save took longer than a cycle.
    busy = Cycle(LoopTime(2.0, 1.5, 0.3), [0.3, *[0.2] * 8, *[0.1] * 3], during=9)
    found = compared(busy, quiet)
    assert found.lost_s == pytest.approx(2.0 - 1.2 - 2 * 0.1)
    assert found.lost_cpu_s == pytest.approx(1.5 - 1.0 - 2 * 0.1)
    assert found.lost_queue_s == pytest.approx(0.2)
    assert found.step_ratio == pytest.approx(2.0) and found.next_steps == pytest.approx(2.0)


def test_the_clock_tells_work_from_sleep() -> None:
    clock = LoopClock()
    time.sleep(0.3)
    asleep = clock.spent()
    assert asleep.wall_s > 0.1 and asleep.cpu_s < 0.1
    while clock.spent().cpu_s < 0.2:
        pass
    assert clock.spent().queue_s >= 0


@pytest.mark.slow
def test_the_hardware_takes_turns_with_a_row_of_ours(tmp_path: Path) -> None:
    state = make_state("tiny")
    found = all_of(measure_row("sync", state, str(tmp_path), QUICK))
    assert all(found[name] > 0 for name in ("raw_copy", "raw_write_2", "raw_read_warm", "raw_read_cold"))
    assert found["torn"] == 0 and list(tmp_path.iterdir()) == []
    # Others' rows are compared with ours, not with the hardware.
    assert not [
        name for name in all_of(measure_row("torch_save", state, str(tmp_path), QUICK)) if name.startswith("raw_")
    ]


def test_raw_writes_are_medians_of_each_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    took = {(2, False): iter([1.0, 1.2, 1.4]), (2, True): iter([0.9, 3.0, 0.8]), (4, True): iter([None, None, None])}

    def write(source: object, nbytes: int, folder: str, threads: int, *, direct: bool) -> float | None:
        return next(took[threads, direct])

    monkeypatch.setattr("ckpt_bench.measure.beside.write", write)
    with RawSaves(5000, str(tmp_path)) as raw:
        for _ in range(3):
            raw.turn()
    found = raw.figures()
    assert (found["raw_write_2"], found["raw_direct_2"], found["raw_direct_4"]) == (1.2, 0.9, None)


def test_loads_take_turns_with_reads_of_the_same_files(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for number in range(3):
        (tmp_path / "folder" / str(number)).write_bytes(bytes(5000 * number))
    seconds = iter([5.0, 7.0, 6.0, 2.0, 1.0, 3.0])
    found = measure_loads(
        lambda: next(seconds), str(tmp_path / "folder"), turns=lambda: range(3), cold=True, raw="crc32"
    )
    assert (found["load_cold"], found["load_warm"]) == (6.0, 2.0)
    assert all(found[name] > 0 for name in ("raw_read_cold", "raw_read_warm"))  # type: ignore[operator]
    found = measure_loads(lambda: 4.0, str(tmp_path / "folder"), turns=lambda: range(1), cold=False, raw=None)
    assert found == {"load_cold": None, "load_warm": 4.0}


@pytest.mark.slow
def test_memory_of_the_process_and_its_peak() -> None:
    before = pss_of_tree()
    assert before >= pss(os.getpid()) > 0
    with sampled_peak() as peak:
        block = torch.ones(64 << 20, dtype=torch.uint8)
        while peak.nbytes < before + (48 << 20):  # the sampler sees it in its own time
            pass
    assert block.sum() == 64 << 20


def test_limits_have_all_that_promises_ask_for(tmp_path: Path) -> None:
    found = all_of(measure_limits(make_state("tiny"), str(tmp_path), turns=[0], cold=True))
    reads = {f"read_{name}_{cache}" for name in checksums() for cache in ("warm", "cold")}
    wanted = {"memcpy", "foreach_copy", "write_1", "write_2", "direct_1", "direct_2", "direct_4", "read_warm"}
    assert (wanted | reads | {"read_cold", "fork", "update", "update_after_fork", "state_bytes"}) == set(found)
    assert all(value is None or value > 0 for value in found.values())
    assert list(tmp_path.iterdir()) == []
    # Where the cache cannot be dropped there is no cold read, rather than a warm one under its name.
    assert all_of(measure_limits(make_state("tiny"), str(tmp_path), turns=[0], cold=False))["read_cold"] is None


def test_files_are_counted_and_read_whole(tmp_path: Path) -> None:
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    for name in ("folder/one", "folder/deep/two"):
        (tmp_path / name).write_bytes(b"x" * 5000)
    assert {os.path.basename(name) for name in files_of(str(tmp_path / "folder"))} == {"one", "two"}
    assert list(files_of(str(tmp_path / "folder" / "one"))) == [str(tmp_path / "folder" / "one")]
    for call in (sync_tree, drop_cache, fill_cache):
        call(str(tmp_path / "folder"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["torch_save", "dcp_save_t1", "dcp_save_t2"])
def test_rows_of_torch_load_what_they_saved(name: str, tmp_path: Path) -> None:
    state = make_state("tiny")
    saver = make_saver(name, state)
    saver.save(str(tmp_path / "one"))
    saver.finish()
    target = {key: torch.zeros_like(value) for key, value in state.items()}
    saver.load(str(tmp_path / "one"), target)
    assert all(torch.equal(target[key], state[key]) for key in state)
    saver.close()
