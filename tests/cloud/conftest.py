"""An S3 server for each worker of pytest, a bucket for each test, and a proxy in front of them that breaks requests.

`bucket` sets the environment variables with which obstore and s3fs find the server; with `proxy` they find the proxy.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from cloud.proxy import FaultProxy
from cloud.server import KEYS, REGION, Bucket, S3Server, start_server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """The server of this worker."""
    pytest.importorskip("moto", reason="needs moto[s3,server]")
    pytest.importorskip("obstore", reason="needs the extra cloud")
    server = start_server()
    yield server
    server.close()


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A fresh bucket; the environment leads to its server."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    s3_server.request("PUT", f"/{name}")
    for key in ("ENDPOINT", "DEFAULT_REGION", "SESSION_TOKEN", "PROFILE", "ROLE_ARN", "WEB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(f"AWS_{key}", raising=False)
    for key, value in {**KEYS, "region": REGION, "allow_http": "true", "endpoint_url": s3_server.endpoint}.items():
        monkeypatch.setenv(f"AWS_{key.upper()}", value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return Bucket(name, s3_server)


@pytest.fixture
def proxy(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy in front of the bucket's server; the environment leads to it."""
    proxy = FaultProxy(bucket.server.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    yield proxy
    proxy.close()
