"""Whole saves to a bucket when requests fail: of the manager, with pointer, events and retirement, on 1 and 2 ranks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from cloud.proxy import Answer, Call, CutAfter, CutBefore, Duplicate, FaultProxy, Request, Strip
from cloud.server import Bucket
from cloud.test_object_requests import ALL, FAULTS, is_manifest
from evidence import Record
from faults.invariants import FIXED, blank_state, differences, state_of
from inside import checkpointer_of, tidied
from ranks import run_ranks
from strides import first_of

from ckpt_component import (
    CheckpointConfigError,
    CheckpointError,
    CheckpointFencedError,
    CheckpointManager,
    CheckpointSaveError,
    build_manager,
)
from ckpt_component.core.commit.names import MANIFEST, MEGATRON, OWNER
from ckpt_component.core.commit.scan import scan_steps
from ckpt_component.core.storage.locate import storage_at

pytestmark = pytest.mark.slow

RANKS = Path(__file__).parent / "scripts" / "resume_elsewhere.py"
USUAL = ["checkpoint.keep.last=1", "checkpoint.save.at_end=false", "checkpoint.timeouts.close=20"]
#: Nothing is said by the process when a request fails once: the store's client repeats it.
QUICK = "checkpoint.retry.backoff_seconds=0.01"


def manager_at(root: str, bucket: Bucket, port: int, *overrides: str, preset: str = "sync") -> CheckpointManager:
    """A run whose requests go to a port; `max_retries` and other options after it."""
    options = {**bucket.options, "endpoint": f"http://127.0.0.1:{port}"}
    given = [f"+checkpoint.storage.options.{name}={value}" for name, value in options.items()]
    return build_manager(preset, [*USUAL, QUICK, *given, *overrides], dir=root)


def retries(count: int) -> str:
    return f"+checkpoint.storage.options.max_retries={count}"


def violations_in(bucket: Bucket, root: str, acknowledged: Sequence[int]) -> tuple[list[str], int]:
    """Check I1 to I3, resume, and I5 as `faults.invariants` does for files, of what a fault left.

    Returns what is wrong in words, and the newest step now, which is that of one more save.
    """
    wrong: list[str] = []
    fs = storage_at(root, options=bucket.options)
    scan = scan_steps(fs, root, MEGATRON)
    for name in ("damaged", "torn", "unusable", "foreign"):
        wrong += [f"I3: step {step} is {name}: {why}" for step, why in getattr(scan, name).items()]
    newest = max(scan.committed, default=0)
    if newest < max(acknowledged, default=0):
        wrong.append(f"I1: {acknowledged} were acknowledged, and there is {scan.committed}")
    bucket.age()
    try:
        with manager_at(root, bucket, bucket.server.port) as manager:
            for step in scan.committed:
                loaded = checkpointer_of(manager).load(manager.path_of(step))
                wrong += [f"I1: step {step}: {text}" for text in differences(loaded, state_of(step))]
            target = blank_state()
            resumed = manager.restore(target) or 0
            wrong += [f"I2: resumed from {resumed}, and the newest is {newest}"] * (resumed != newest)
            wrong += [f"I2: step {resumed}: {text}" for text in differences(target, state_of(resumed))]
            newest += 1
            manager.save(newest, state_of(newest))
            manager.wait()
            tidied(manager)
    except CheckpointError as error:
        return [*wrong, f"I2/I5: {type(error).__name__}: {error}"], newest
    prefix = root.removeprefix(f"{bucket.url}/")
    keys = bucket.keys(prefix)
    folder = f"{prefix}/{MEGATRON.folder(newest)}/"
    left = [key for key in keys if not key.startswith(folder) and key.split("/")[1] not in {*FIXED, ".ckpt-folder"}]
    attempts = {key.removeprefix(folder).split("/")[0] for key in keys if key.startswith(folder)}
    wrong += [f"I5: left behind: {left}"] * bool(left)
    wrong += [f"I5: there is {attempts} in the newest step"] * (len(attempts - {".ckpt-folder"}) != 2)
    return wrong, newest


@pytest.mark.parametrize(
    ("preset", "stride"),
    [
        ("sync", 40),
        pytest.param("async_persistent", 90, marks=pytest.mark.soak),
        pytest.param("sync", 1, marks=ALL),
        pytest.param("async_persistent", 3, marks=ALL),
    ],
)
@pytest.mark.parametrize(
    "fault",
    [
        "cut_after_from_then_on",
        *(pytest.param(each, marks=ALL) for each in ("cut_before_from_then_on", "cut_after", "duplicate")),
    ],
)
def test_every_request_of_a_save(
    fault: str, preset: str, stride: int, bucket: Bucket, proxy: FaultProxy, record_property: Record
) -> None:
    make, times, count = FAULTS[fault]
    root = f"{bucket.url}/run"
    wrong, step = violations_in(bucket, root, [])
    rounds = failed = 0
    for nth in itertools.count(first_of(stride), stride):
        proxy.clear()
        with manager_at(root, bucket, proxy.port, retries(count), preset=preset) as manager:
            proxy.clear()
            rule = proxy.add(make(), nth=nth, times=times)
            acknowledged, error = [step], None
            try:
                manager.save(step + 1, state_of(step + 1))
                manager.wait()
                acknowledged.append(step + 1)
                tidied(manager)
            except CheckpointSaveError as caught:
                error, failed = caught, failed + 1
            proxy.clear()
        puts = [request for request in proxy.log if is_manifest(request) and request.status == 200]
        found, step = violations_in(bucket, root, acknowledged)
        at = f"{fault} at {nth} ({rule.hits[0] if rule.hits else 'end'}): {error}"
        wrong += [f"{at}: {text}" for text in found]
        wrong += [f"{at}: committed more than once: {puts}"] * (len(puts) > 1)
        rounds += 1
        if not rule.hits:
            break
    print(f"{preset}, {fault}: {rounds} requests, {failed} failed saves, {len(wrong)} violations")
    record_property("requests", rounds)
    assert not wrong, "\n".join(wrong)
    assert rounds > 40 // stride
    assert times is not None or failed or stride > 1  # late requests are those of the retirement


def test_two_jobs_race_for_a_step_and_one_wins(bucket: Bucket, proxy: FaultProxy) -> None:
    """The second job takes over, and commits the same step, while the put of the first one's manifest is on its way."""
    root = f"{bucket.url}/run"
    with manager_at(root, bucket, proxy.port) as first, manager_at(root, bucket, bucket.server.port) as second:

        def overtake(request: Request) -> None:
            second.save(1, state_of(1))
            second.wait()

        rule = proxy.add(Call(overtake), where=is_manifest)
        with pytest.raises(CheckpointFencedError, match="took over"):
            first.save(1, state_of(1))
            first.wait()
        assert len(rule.hits) == 1 and second.steps() == [1]
        # The one that lost stays fenced off; the other one goes on.
        with pytest.raises(CheckpointFencedError):
            first.save(2, state_of(2))
            first.wait()
        second.save(2, state_of(2))
        second.wait()
        tidied(second)
        assert second.steps() == [2]
    wrong, _ = violations_in(bucket, root, [2])
    assert not wrong, "\n".join(wrong)


def test_a_bucket_without_the_owner_of_this_run_is_not_written_to(bucket: Bucket, proxy: FaultProxy) -> None:
    """A prefix that was deleted or moved under the run."""
    root = f"{bucket.url}/run"
    with manager_at(root, bucket, proxy.port) as manager:
        manager.save(1, state_of(1))
        manager.wait()
        storage = storage_at(root, options=dict(bucket.options))
        owner = storage.read(f"{root}/{OWNER}", 1 << 16)
        storage.unlink(f"{root}/{OWNER}")
        with pytest.raises(CheckpointSaveError, match="is no longer the folder"):
            manager.save(2, state_of(2))
            manager.wait()
        assert not storage.exists(f"{root}/{OWNER}") and manager.steps() == [1]
        storage.write_over(f"{root}/{OWNER}", owner)
        manager.save(3, state_of(3))
        manager.wait()
        tidied(manager)
        assert manager.steps() == [3]


@pytest.mark.parametrize(
    "policy", ["warn", *(pytest.param(each, marks=pytest.mark.soak) for each in ("raise", "retry"))]
)
def test_the_server_is_killed_in_the_middle_of_a_save_and_comes_back(
    policy: str, bucket: Bucket, proxy: FaultProxy, tmp_path: Path
) -> None:
    root = f"{bucket.url}/run"
    overrides = [f"checkpoint.on_error={policy}", retries(0), "checkpoint.retry.attempts=10"]
    with manager_at(root, bucket, proxy.port, *overrides, preset="async_persistent") as manager:
        manager.save(1, state_of(1))
        manager.wait()
        proxy.add(CutBefore(), times=None, nth=3, where=lambda r: r.method == "PUT" or "delete" in r.query)
        before = len(proxy.log)
        manager.save(2, state_of(2))
        deadline = time.monotonic() + 30
        while not any(request.method == "PUT" for request in proxy.log[before:]):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        proxy.stop()
        # Training goes on: no step waits for the bucket.
        weights = torch.zeros(100)
        start = time.monotonic()
        for _ in range(50):
            weights += 1
            time.sleep(0.001)
        assert time.monotonic() - start < 5
        proxy.clear()
        if policy == "raise":
            with pytest.raises(
                CheckpointSaveError
            ):  # a server that is back in time is no failure: requests are repeated
                manager.wait()
        proxy.start()
        manager.wait()
        manager.save(3, state_of(3))
        manager.wait()
        tidied(manager)
        assert manager.steps() == [3]
    bucket.age()  # else the resume waits a minute for the attempt whose mark of life could not be deleted
    for name, world_size in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        told = run_ranks(RANKS, "resume", world_size, tmp_path / name, CKPT_TEST_ROOT=root)
        assert all("resumed 3" in text for text in told)
    wrong, _ = violations_in(bucket, root, [3])
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("status", [409, 503])
def test_errors_that_pass_cost_no_save(status: int, bucket: Bucket, proxy: FaultProxy) -> None:
    root = f"{bucket.url}/run"
    with manager_at(root, bucket, proxy.port) as manager:
        rule = proxy.add(Answer(status), times=2, where=is_manifest)
        manager.save(1, state_of(1))
        manager.wait()
        assert len(rule.hits) == 2 and manager.steps() == [1]


@pytest.mark.parametrize("fault", [CutAfter(), Duplicate(second=True)], ids=["lost", "done_twice"])
@pytest.mark.parametrize("preset", ["async_persistent"])
def test_a_lost_reply_of_the_manifest_is_a_commit(
    fault: CutAfter, preset: str, bucket: Bucket, proxy: FaultProxy
) -> None:
    root = f"{bucket.url}/run"
    with manager_at(root, bucket, proxy.port, preset=preset) as manager:
        rule = proxy.add(fault, where=is_manifest)
        manager.save(1, state_of(1))
        manager.wait()
        assert len(rule.hits) == 1 and manager.steps() == [1]


def test_a_step_that_is_taken_is_refused(bucket: Bucket, proxy: FaultProxy) -> None:
    root = f"{bucket.url}/run"
    with manager_at(root, bucket, proxy.port) as manager:
        proxy.add(Answer(412), where=is_manifest)
        with pytest.raises((CheckpointError, OSError)):
            manager.save(1, state_of(1))
            manager.wait()
        assert not [key for key in bucket.keys("") if key.endswith(MANIFEST)]


def test_a_store_that_ignores_conditions_is_refused_when_the_run_is_built(bucket: Bucket, proxy: FaultProxy) -> None:
    proxy.add(Strip("if-none-match"), times=None)
    with pytest.raises((CheckpointConfigError, CheckpointError), match="If-None-Match"):
        manager_at(f"{bucket.url}/run", bucket, proxy.port, "checkpoint.save.every_steps=1").close()
    assert not [key for key in bucket.keys("") if "manifest" in key]


@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_a_bucket_that_is_away_when_a_save_begins(policy: str, bucket: Bucket, proxy: FaultProxy) -> None:
    """It is an error of the save, which `on_error` applies to."""
    overrides = [f"checkpoint.on_error={policy}", retries(0)]
    with manager_at(f"{bucket.url}/run", bucket, proxy.port, *overrides, preset="async_persistent") as manager:
        manager.save(1, state_of(1))
        manager.wait()
        proxy.stop()
        if policy == "raise":
            with pytest.raises(CheckpointSaveError, match="whether the path is free"):
                manager.save(2, state_of(2))
        else:
            manager.save(2, state_of(2))
            manager.wait()
        proxy.start()
        manager.save(3, state_of(3))
        manager.wait()
        tidied(manager)
        assert manager.steps() == [3]
