"""Published weights in a bucket: received with requests that read alone, also when the bucket does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from cloud.proxy import FaultProxy
from cloud.server import Bucket
from published import Source, assert_at, bytes_of, pull, random_state, stepped

from ckpt_component import CheckpointCorruptError
from ckpt_component.publishing import follow
from ckpt_component.publishing.receiver import Receiver


def test_every_version_arrives(bucket: Bucket, tmp_path: Path) -> None:
    source, folder = Source(f"{bucket.url}/to", shards=2), str(tmp_path / "model")
    source.chain(1, 3)
    source.whole(4, random_state(4, scale=2000))  # more than one request
    for number in (2, 3, 4):
        pull(source, folder, number)
        assert_at(source, folder, number)


def test_no_request_changes_the_bucket(bucket: Bucket, proxy: FaultProxy, tmp_path: Path) -> None:
    source, folder = Source(f"{bucket.url}/to"), str(tmp_path / "model")
    source.chain(1, 3)
    proxy.clear()
    pull(source, folder, 2)
    pull(source, folder)
    assert_at(source, folder, 3)
    assert {request.method for request in proxy.log} <= {"GET", "HEAD"}


def test_following_goes_on_when_the_bucket_answers_again(
    bucket: Bucket, proxy: FaultProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = Source(f"{bucket.url}/to")
    source.chain(1, 1)
    with Receiver(source.root, str(tmp_path / "model"), options={"max_retries": 0}) as receiver:
        versions = receiver.follow(0.05)
        assert next(versions).version == 1
        source.delta(2, stepped(source.states[1], 2))
        proxy.stop()
        with pytest.raises(TimeoutError):
            [*receiver.follow(0.05, timeout=0.5)]
        proxy.start()
        assert next(versions).version == 2
        versions.close()
    assert caplog.text.count("until that is over") == 1
    assert_at(source, tmp_path / "model", 2)


def test_a_damaged_object_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    source, folder = Source(f"{bucket.url}/to"), str(tmp_path / "model")
    source.chain(1, 2)
    for file in source.storage.files_below(f"{source.root}/weight_v000002"):
        if file.path.endswith("model-00001.safetensors"):
            data = bytearray(source.storage.read(file.path, 1 << 30))
            data[-1] ^= 1
            source.storage.write_over(file.path, bytes(data))
    pull(source, folder, 1)
    with pytest.raises(CheckpointCorruptError, match="model-00001"):
        pull(source, folder)
    assert_at(source, folder, 1)


def test_follow_takes_the_options_of_the_bucket(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(f"{bucket.url}/to")
    source.chain(1, 2)
    for key in ("ENDPOINT_URL", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.delenv(f"AWS_{key}")
    weights = next(versions := follow(source.root, options=bucket.options, timeout=30))
    assert weights.version == 2
    assert {name: array.tobytes() for name, array in weights.arrays()} == bytes_of(source.states[2])
    versions.close()
