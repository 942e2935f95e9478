"""Buckets when requests fail: each request of a commit and of a retirement, cut, lost, done twice and refused."""

from __future__ import annotations

import pytest
from cloud.proxy import FaultProxy, kinds
from cloud.server import Bucket

from ckpt_component.storage.locate import storage_at

pytestmark = pytest.mark.slow


def test_the_environment_sets_the_client_too(bucket: Bucket, proxy: FaultProxy) -> None:
    """`AWS_ALLOW_HTTP` is for the HTTP client, whose options obstore takes from the environment alone or not at all."""
    storage_at(bucket.url).write_new(f"{bucket.url}/a", b"1")
    storage_at(bucket.url, options={"connect_timeout": 5}).write_new(f"{bucket.url}/b", b"2")
    assert bucket.keys() == ["a", "b"] and set(kinds(proxy.log)) == {"put new"}
