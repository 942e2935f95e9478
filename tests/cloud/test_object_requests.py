"""Buckets when requests fail: each request of a commit and of a retirement, cut, lost, done twice and refused."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from cloud.proxy import Answer, Call, CutAfter, CutBefore, Duplicate, Fault, FaultProxy, Request, Strip, kinds
from cloud.server import Bucket
from evidence import Record
from strides import first_of

from ckpt_component import CheckpointError, CheckpointExistsError, CheckpointFencedError
from ckpt_component.core.commit import commit
from ckpt_component.core.commit.cleanup import Unfinished, discard
from ckpt_component.core.commit.fencing import FencingToken
from ckpt_component.core.commit.manifest import data_folder, read_manifest
from ckpt_component.core.commit.names import MANIFEST, MEGATRON, OWNER
from ckpt_component.core.commit.protocol import Attempt
from ckpt_component.core.commit.scan import scan_steps
from ckpt_component.core.storage import bucket as objects
from ckpt_component.core.storage.locate import storage_at
from ckpt_component.core.storage.new_names import new_token
from ckpt_component.core.storage.storage import Storage

pytestmark = pytest.mark.slow

DATA = bytes(range(256)) * 80
PART = 4096
ALL = [pytest.mark.soak, pytest.mark.timeout(900)]

#: Name -> the fault, to how many requests from the n-th on (None: all), how often the client repeats a request.
FAULTS: dict[str, tuple[Callable[[], Fault], int | None, int]] = {
    "cut_before": (CutBefore, 1, 3),
    "cut_before_without_retry": (CutBefore, 1, 0),
    "cut_before_from_then_on": (CutBefore, None, 0),
    "cut_after": (CutAfter, 1, 3),
    "cut_after_without_retry": (CutAfter, 1, 0),
    "cut_after_from_then_on": (CutAfter, None, 0),
    "duplicate": (Duplicate, 1, 0),
    "duplicate_answered_by_the_second": (lambda: Duplicate(second=True), 1, 0),
    "error_500_without_retry": (lambda: Answer(500), 1, 0),
    "error_503": (lambda: Answer(503), 1, 3),
    "error_409": (lambda: Answer(409), 1, 3),
}


def written(fs: Storage, root: str, step: int, owner: str = "") -> Attempt:
    """An attempt that lacks nothing but its commit, with one file in parts and one in a single put."""
    attempt = commit.new_attempt(fs, os.path.join(root, MEGATRON.folder(step)), new_token(), owner)
    commit.begin(attempt)
    try:
        fd = fs.create(os.path.join(attempt.staging, "data"), len(DATA))
        try:
            for begin in range(0, len(DATA), PART):
                fs.write(fd, [memoryview(DATA)[begin : begin + PART]], begin)
            fs.sync(fd)
        finally:
            fs.close(fd)
    except OSError:
        commit.abandon(attempt)
        raise
    return attempt


def publish(fs: Storage, attempt: Attempt) -> None:
    rank = {"rank": 0, "files": [{"name": "data", "size": len(DATA)}]}
    try:
        commit.publish(attempt, [rank], {".metadata": b"m"}, {"format": "x"}, 0.05)
    except (CheckpointError, OSError):
        commit.abandon(attempt)
        raise


def committed(fs: Storage, root: str, step: int) -> Attempt:
    attempt = written(fs, root, step)
    publish(fs, attempt)
    return attempt


def whole_steps(fs: Storage, root: str, wrong: list[str]) -> dict[int, str]:
    """The steps that are listed -> the token of the attempt that was committed; says what is wrong with them."""
    scan = scan_steps(fs, root, MEGATRON)
    for name in ("damaged", "torn", "unusable", "foreign"):
        wrong += [f"I3: step {step} is {name}: {why}" for step, why in getattr(scan, name).items()]
    tokens = {}
    for step in scan.committed:
        target = os.path.join(root, MEGATRON.folder(step))
        manifest = read_manifest(fs, target)
        assert manifest is not None
        tokens[step] = str(manifest["attempt"])
        if fs.read(os.path.join(data_folder(fs, target, manifest), "data"), 1 << 20) != DATA:
            wrong.append(f"I1: step {step} has other bytes")
    return tokens


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_PART_BYTES", PART)


def keeps_trying(retries: int, root: str) -> Storage:
    return storage_at(root, options={"max_retries": retries})


@pytest.mark.parametrize("stride", [18, pytest.param(1, marks=ALL)])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_request_of_a_commit_and_of_a_retirement(
    fault: str, stride: int, bucket: Bucket, proxy: FaultProxy, small_parts: None, record_property: Record
) -> None:
    """Step n + 1 is saved and step n deleted, with a fault at the 1st, 2nd, 3rd ... request."""
    make, times, retries = FAULTS[fault]
    root = f"{bucket.url}/run"
    fs, healthy = keeps_trying(retries, root), storage_at(root, options=bucket.options)
    wrong: list[str] = []
    step, rounds, failed = 1, 0, 0
    committed(healthy, root, step)
    for nth in itertools.count(first_of(stride), stride):
        proxy.clear()
        rule = proxy.add(make(), nth=nth, times=times)
        error: Exception | None = None
        attempt = None
        try:
            attempt = written(fs, root, step + 1)
            publish(fs, attempt)
            discard(fs, os.path.join(root, MEGATRON.folder(step)))
        except (CheckpointError, OSError) as caught:
            error = caught
        proxy.clear()
        at = f"{fault} at {nth} ({rule.hits[0] if rule.hits else 'end'}): {error!r}"
        violations: list[str] = []
        tokens = whole_steps(healthy, root, violations)
        if error is None and (attempt is None or tokens.get(step + 1) != attempt.token):
            violations.append(f"I1: it was acknowledged, and there is {tokens}")
        if error is not None and step not in tokens:
            violations.append(f"I1: step {step} was acknowledged and there is {tokens}")
        # What is said to have failed may be there only if it was said that nobody knows.
        if error is not None and step + 1 in tokens and "Could not find out" not in str(error):
            violations.append(f"I3: it was reported as failed, and there is {tokens}")
        failed += error is not None
        rounds += 1
        step = max(tokens, default=step)
        # The next run sweeps, and saves; nothing else stays.
        bucket.age()
        Unfinished(healthy, root, MEGATRON).sweep()
        for old in tokens:
            if old != step:
                discard(healthy, os.path.join(root, MEGATRON.folder(old)))
        step += 1
        newest = committed(healthy, root, step)
        discard(healthy, os.path.join(root, MEGATRON.folder(step - 1)))
        folder = f"run/{MEGATRON.folder(step)}"
        expected = {f"{folder}/{MANIFEST}"} | {f"{folder}/{newest.token}/{name}" for name in ("data", ".metadata")}
        left = [key for key in bucket.keys("run") if key not in expected and not key.endswith(".ckpt-folder")]
        violations += [f"I5: left behind: {left}"] * bool(left)
        violations += [f"I5: missing: {sorted(expected - set(bucket.keys('run')))}"] * bool(
            expected - set(bucket.keys("run"))
        )
        wrong += [f"{at}: {text}" for text in violations]
        if not rule.hits:
            break
    record_property("requests", rounds)
    print(f"{fault}: {rounds} requests, {failed} failed saves, {len(wrong)} violations")
    assert not wrong, "\n".join(wrong)
    assert rounds > 24 // stride


def test_the_environment_sets_the_client_too(bucket: Bucket, proxy: FaultProxy) -> None:
    """`AWS_ALLOW_HTTP` is for the HTTP client, whose options obstore takes from the environment alone or not at all."""
    storage_at(bucket.url).write_new(f"{bucket.url}/a", b"1")
    storage_at(bucket.url, options={"connect_timeout": 5}).write_new(f"{bucket.url}/b", b"2")
    assert bucket.keys() == ["a", "b"] and set(kinds(proxy.log)) == {"put new"}


def is_manifest(request: Request) -> bool:
    return request.method == "PUT" and request.key.endswith(MANIFEST)


@pytest.mark.parametrize("times", [1, 3])
def test_a_conflict_of_the_manifest_is_retried(times: int, bucket: Bucket, proxy: FaultProxy) -> None:
    root = f"{bucket.url}/run"
    rule = proxy.add(Answer(409), times=times, where=is_manifest)
    attempt = committed(keeps_trying(0, root), root, 1)
    assert len(rule.hits) == times
    assert whole_steps(storage_at(root), root, []) == {1: attempt.token}


@pytest.mark.parametrize("fault", [CutBefore(), CutAfter()], ids=["not_done", "done"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_manifest_whose_connection_is_cut_is_put_again(
    fault: Fault, times: int, bucket: Bucket, proxy: FaultProxy
) -> None:
    root = f"{bucket.url}/run"
    rule = proxy.add(fault, times=times, where=is_manifest)
    attempt = committed(keeps_trying(0, root), root, 1)
    assert len(rule.hits) == times
    assert whole_steps(storage_at(root), root, []) == {1: attempt.token}


def test_a_manifest_that_is_taken_is_not_written_over(bucket: Bucket, proxy: FaultProxy) -> None:
    root = f"{bucket.url}/run"
    fs = storage_at(root)
    one, two = written(fs, root, 1), written(fs, root, 1)
    publish(fs, one)
    with pytest.raises(CheckpointExistsError, match="taken by another save"):
        publish(fs, two)
    assert [request.status for request in proxy.log if is_manifest(request)] == [200, 412]
    assert whole_steps(fs, root, []) == {1: one.token}
    left = bucket.keys()
    assert not any(two.token in key for key in left)


@pytest.mark.parametrize("fault", [CutAfter(), Duplicate(second=True)], ids=["lost", "done_twice"])
@pytest.mark.parametrize("retries", [0, 3])
def test_a_manifest_whose_answer_is_lost_is_read_back(
    fault: Fault, retries: int, bucket: Bucket, proxy: FaultProxy
) -> None:
    root = f"{bucket.url}/run"
    rule = proxy.add(fault, where=is_manifest)
    attempt = committed(keeps_trying(retries, root), root, 1)
    assert len(rule.hits) == 1
    assert whole_steps(storage_at(root), root, []) == {1: attempt.token}


def test_a_store_that_ignores_conditions_is_refused(bucket: Bucket, proxy: FaultProxy) -> None:
    root = f"{bucket.url}/run"
    storage_at(root).try_folder(root, ".trial")
    assert bucket.keys() == []
    proxy.add(Strip("if-none-match"), times=None)
    with pytest.raises(OSError, match="If-None-Match"):
        storage_at(root).try_folder(root, ".trial")
    assert bucket.keys() == []


def test_clients_that_race_for_a_step_commit_once(bucket: Bucket, proxy: FaultProxy) -> None:
    root = f"{bucket.url}/run"
    for step in range(1, 6):
        start, told = threading.Barrier(4), list[Any]()

        def race(step: int = step, start: threading.Barrier = start, told: list[Any] = told) -> None:
            fs = storage_at(root)
            try:
                attempt = written(fs, root, step)
                start.wait(30)
                publish(fs, attempt)
                told.append(attempt.token)
            except CheckpointExistsError:
                told.append(None)
            except BaseException as error:
                told.append(error)

        threads = [threading.Thread(target=race) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sum(token is not None for token in told) == 1, told
        (winner,) = [token for token in told if token is not None]
        assert len(told) == 4 and whole_steps(storage_at(root), root, [])[step] == winner


def test_a_run_that_lost_the_root_in_the_middle_of_its_save_is_fenced(bucket: Bucket, proxy: FaultProxy) -> None:
    root = f"{bucket.url}/run"
    first, second = storage_at(root), storage_at(root, options=bucket.options)
    claim = FencingToken(first, root)
    claim.acquire()
    other = FencingToken(second, root)
    # The other run comes between the last file of the first one and its look at the owner.
    proxy.add(Call(lambda request: other.acquire()), where=lambda r: r.method == "GET" and r.key.endswith(OWNER))
    attempt = written(first, root, 1, claim.token)
    with pytest.raises(CheckpointFencedError, match="took over"):
        publish(first, attempt)
    assert whole_steps(second, root, []) == {}
    publish(second, written(second, root, 1, other.token))
    assert list(whole_steps(second, root, [])) == [1]
