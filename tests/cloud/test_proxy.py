"""The server and the proxy themselves: what they say they do to a request is what a client sees."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from cloud.proxy import Answer, Call, CutAfter, CutBefore, Delay, Duplicate, FaultProxy, Strip, kinds
from cloud.server import Bucket

obstore = pytest.importorskip("obstore", reason="needs the extra cloud")
pytestmark = pytest.mark.slow

#: The client asks once, so that a test sees each fault.
ONCE = {"max_retries": 0, "retry_timeout": timedelta(seconds=5)}


@pytest.fixture
def store(bucket: Bucket, proxy: FaultProxy) -> Any:
    return bucket.store(endpoint=proxy.endpoint, retry_config=ONCE)


def test_requests_are_passed_on_and_logged(bucket: Bucket, proxy: FaultProxy, store: Any) -> None:
    obstore.put(store, "a/b", b"12345", mode="create")
    obstore.put(store, "a/c", b"67890", use_multipart=False)
    with obstore.open_writer(store, "big", buffer_size=5 << 20) as writer:
        writer.write(bytes(11 << 20))
    assert obstore.get_range(store, "a/b", start=1, length=3).to_bytes() == b"234"
    assert obstore.head(store, "big")["size"] == 11 << 20
    assert [item["path"] for page in obstore.list(store, prefix="a") for item in page] == ["a/b", "a/c"]
    obstore.delete(store, ["a/b"])
    assert bucket.keys() == ["a/c", "big"]
    parts = ["upload part"] * 3
    expected = ["put new", "put", "create multipart", *parts, "complete multipart", "get", "head", "list"]
    assert kinds(proxy.log)[: len(expected)] == expected
    assert {request.bucket for request in proxy.log} == {bucket.name}
    assert [request.status for request in proxy.log[:2]] == [200, 200]
    assert proxy.log[0].key == "a/b"
    assert sorted(request.query["partNumber"] for request in proxy.log[3:6]) == ["1", "2", "3"]


def test_a_request_that_is_cut_before_is_not_seen_by_the_server(bucket: Bucket, proxy: FaultProxy, store: Any) -> None:
    rule = proxy.add(CutBefore(), nth=2)
    obstore.put(store, "one", b"1")
    with pytest.raises(Exception, match="error sending request|connection|reset"):
        obstore.put(store, "two", b"2", mode="create")
    obstore.put(store, "three", b"3")
    assert bucket.keys() == ["one", "three"]
    assert [request.key for request in rule.hits] == ["two"]


def test_a_request_that_is_cut_after_is_done(bucket: Bucket, proxy: FaultProxy, store: Any) -> None:
    proxy.add(CutAfter(), where=lambda r: r.key == "two")
    with pytest.raises(Exception, match="error sending request|connection|reset"):
        obstore.put(store, "two", b"2", mode="create")
    assert bucket.keys() == ["two"]
    assert proxy.log[0].status is None


def test_a_duplicate_is_refused_by_the_condition(bucket: Bucket, proxy: FaultProxy, store: Any) -> None:
    proxy.add(Duplicate())
    obstore.put(store, "one", b"1", mode="create")
    proxy.add(Duplicate(second=True))
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        obstore.put(store, "two", b"2", mode="create")
    assert bucket.keys() == ["one", "two"]


def test_answers_of_the_proxy(bucket: Bucket, proxy: FaultProxy, store: Any) -> None:
    for status in (409, 412, 500, 503):
        proxy.clear()
        proxy.add(Answer(status))
        with pytest.raises((obstore.exceptions.BaseError, OSError)):
            obstore.put(store, "one", b"1", mode="create")
        assert [request.status for request in proxy.log][:1] == [status]
    assert bucket.keys() == []


def test_a_store_without_conditions(bucket: Bucket, proxy: FaultProxy, store: Any) -> None:
    proxy.add(Strip("if-none-match"), times=None)
    obstore.put(store, "one", b"1", mode="create")
    obstore.put(store, "one", b"2", mode="create")
    assert obstore.get(store, "one").bytes().to_bytes() == b"2"


def test_delays_end_when_they_are_told_to(proxy: FaultProxy, store: Any) -> None:
    delay = Delay(30)
    proxy.add(delay)
    done = threading.Thread(target=obstore.put, args=(store, "late", b"1"))
    done.start()
    deadline = time.monotonic() + 10
    while not proxy.log and time.monotonic() < deadline:
        time.sleep(0.005)
    assert done.is_alive() and proxy.log[0].status is None
    delay.until.set()
    done.join(10)
    assert proxy.log[0].status == 200


def test_bodies_go_at_the_rate_that_is_set(proxy: FaultProxy, store: Any) -> None:
    proxy.bytes_per_second = 4e6
    start = time.monotonic()
    obstore.put(store, "one", bytes(1 << 20), use_multipart=False)
    obstore.get(store, "one").bytes()
    assert time.monotonic() - start >= 2 * (1 << 20) / 4e6


def test_a_server_that_is_stopped_and_comes_back(bucket: Bucket, proxy: FaultProxy, store: Any) -> None:
    obstore.put(store, "one", b"1")
    proxy.stop()
    with pytest.raises(Exception, match="error sending request|onnect"):
        obstore.put(store, "two", b"2")
    proxy.start()
    obstore.put(store, "three", b"3")
    assert bucket.keys() == ["one", "three"]


def test_what_is_on_its_way_when_the_server_stops_is_cut(bucket: Bucket, proxy: FaultProxy, store: Any) -> None:
    stopped = threading.Event()

    def stop(request: Any) -> None:
        def stop_it() -> None:
            proxy.stop()
            stopped.set()

        threading.Thread(target=stop_it).start()
        assert stopped.wait(10)

    proxy.add(Call(stop))
    with pytest.raises(Exception, match="error sending request|onnect"):
        obstore.put(store, "one", b"1", mode="create")
    assert bucket.keys() == []


def test_s3fs_finds_the_proxy_too(bucket: Bucket, proxy: FaultProxy) -> None:
    s3fs = pytest.importorskip("s3fs", reason="reads the stock formats")
    fs = s3fs.S3FileSystem(skip_instance_cache=True)
    fs.pipe_file(f"{bucket.name}/one", b"12345")
    assert fs.cat_file(f"{bucket.name}/one", start=1, end=3) == b"23"
    assert bucket.keys() == ["one"]
    assert "get" in kinds(proxy.log)


def test_what_is_in_a_bucket_can_be_made_older(bucket: Bucket) -> None:
    store = bucket.store()
    obstore.put(store, "one", b"1")
    before = obstore.head(store, "one")["last_modified"]
    bucket.age()
    assert (before - obstore.head(store, "one")["last_modified"]).total_seconds() > 3600
    assert [item["path"] for page in obstore.list(store) for item in page] == ["one"]
