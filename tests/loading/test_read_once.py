"""Several hosts load together: each byte leaves storage once, and whatever happens on its way costs it once more."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ranks import finish_ranks, run_ranks, start_ranks

SCRIPT = Path(__file__).parent / "scripts" / "read_once.py"
#: A cell of the grid that files are cut by, when a checkpoint is small.
CELL = 64 << 10


def printed_by(function: str, world_size: int, folder: Path) -> Any:
    return json.loads(run_ranks(SCRIPT, function, world_size, folder)[0].splitlines()[-1])


def check_matrix(world_size: int, folder: Path) -> None:
    for name, (is_whole, counts, error, stored) in printed_by("matrix", world_size, folder).items():
        assert is_whole and not error, name
        assert 0.98 * stored < sum(counts) <= stored, (name, counts, stored)
        if not name.startswith("fsdp"):  # of the same sharding: each rank reads its own, which is not quite as much
            assert max(counts) <= 1.1 * stored / world_size + CELL, (name, counts)


@pytest.mark.slow
def test_two_hosts_read_each_byte_once_for_any_sharding_and_any_world_that_saved(tmp_path: Path) -> None:
    check_matrix(2, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [4, 8])
def test_more_hosts_read_each_byte_once(world_size: int, tmp_path: Path) -> None:
    check_matrix(world_size, tmp_path)


@pytest.mark.slow
def test_what_goes_wrong_on_the_way_costs_these_bytes_once_more_and_nothing_else(tmp_path: Path) -> None:
    found = printed_by("troubles", 3, tmp_path)
    most = found.pop("most")
    assert all(0 < batches <= 8 and 0 < largest < 6 << 20 for batches, largest in most)
    for name, (is_whole, counts, errors, stored) in found.items():
        total, part = sum(counts), stored / 3
        if name in ("fine", "slow", "afterwards"):
            assert 0.98 * stored < total <= stored, (name, counts)
        elif name in ("off", "one host"):
            assert all(0.98 * stored < count <= stored for count in counts), (name, counts)
        elif name in ("cannot read once", "flip, unverified"):  # the ranks that it was for read one batch again
            assert stored < total <= stored + 2 * CELL, (name, counts)
        elif name == "flip":  # another rank read an item again, of which it cannot say what is damaged
            again = max(counts[0], counts[2])
            assert total - again <= 0.75 * stored and again <= 1.3 * stored, counts
        elif name == "hangs":  # what rank 1 was to read, all read; on a busy machine, another rank may seem to hang too
            assert total <= stored + 3 * 2 * 1.1 * part, counts
        if name in ("cannot read", "damaged"):
            kind = "Unreadable" if name == "cannot read" else "Corrupt"
            assert all(error.startswith(f"Checkpoint{kind}Error") for error in errors), errors
        else:
            assert all(is_whole) and not any(errors), (name, errors)
        if name == "cannot read":
            assert is_whole == [True, False, True] and counts[0] + counts[2] <= 1.4 * stored, counts


@pytest.mark.slow
def test_a_killed_owner_costs_what_it_was_to_read_and_an_error_in_time(tmp_path: Path) -> None:
    first, dead, last = finish_ranks(start_ranks(SCRIPT, "killed", 3, tmp_path))
    assert (first.code, dead.code, last.code) == (0, -9, 0), (first.output, last.output)
    for rank in (first, last):
        is_whole, count, error, stored = json.loads(rank.output.splitlines()[-1])
        assert is_whole and error.startswith("RanksError: Rank 1 failed"), error
        assert count <= 0.7 * stored, "its own third, and what rank 1 was to read"


@pytest.mark.slow
def test_files_of_other_programs_are_read_once_and_never_mistaken_for_those_of_another_host(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    found = printed_by("own_files", 2, tmp_path)
    assert found.pop("own") == [True, True]
    for name, (is_whole, counts, error, stored) in found.items():
        assert all(is_whole) and not error, (name, error)
        # Each rank reads the header; and where the system counts, what is copied within memory too.
        assert sum(counts) <= (1.1 if name == "weights" else 1.01) * stored, (name, counts)


@pytest.mark.slow
def test_what_a_rank_reads_from_the_system_is_its_part_of_the_checkpoint(tmp_path: Path) -> None:
    """By `/proc/PID/io`, and not by what our own code says that it reads."""
    if not os.path.exists("/proc/self/io"):
        pytest.skip("this system does not count what a process reads")
    for together, alone, stored in printed_by("system_reads", 2, tmp_path):
        assert together <= 0.55 * stored and alone >= 0.98 * stored


@pytest.mark.slow
def test_ranks_on_one_host_do_not_import_what_shares_reads(tmp_path: Path) -> None:
    assert printed_by("one_host", 2, tmp_path) == [True, "", False]
