"""moto's S3 server on a free port of 127.0.0.1; as a script it is the server, which ends when its stdin is closed."""

from __future__ import annotations

import contextlib
import datetime
import http.client
import io
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

END_SECONDS = 5.0
_REPLY_SECONDS = 30.0
_HOURS = datetime.timedelta(hours=2)
#: Path of a request that is none of S3: `Bucket.age`.
AGE = "test-age"
#: GCS's XML API is that of S3 but for the header of a conditional put, so moto answers the requests of `gs://` too.
#: What GCS itself would answer, this does not show.
_GCS_CONDITION = "HTTP_X_GOOG_IF_GENERATION_MATCH"
REGION = "us-east-1"
KEYS = {"access_key_id": "test", "secret_access_key": "not-a-secret"}


@dataclass
class S3Server:
    """The tests' side of the server: its process, and requests to it that pass no proxy."""

    process: subprocess.Popen[str] = field(repr=False)
    port: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Send one request, unsigned; returns the body of the answer, which must be of success."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_REPLY_SECONDS)
        with contextlib.closing(connection):
            connection.request(method, path, body)
            answer = connection.getresponse()
            text = answer.read()
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status}: {text.decode(errors='replace')}")
        return text

    def close(self) -> None:
        """End the process."""
        end_server(self.process)


def end_server(process: subprocess.Popen[str]) -> None:
    """End a server that ends when its stdin is closed."""
    assert process.stdin and process.stdout
    process.stdin.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def start_server() -> S3Server:
    """Start a server, empty; it ends with this process at the latest."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__)), "serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "S3_UPLOAD_PART_MIN_SIZE": "256"},  # S3 itself: 5 MiB
    )
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the S3 server did not start: exit code {process.wait(END_SECONDS)}")
    return S3Server(process, int(line))


@dataclass(frozen=True)
class Bucket:
    """A bucket that is empty at first.

    Attributes:
        name: of the bucket; `url` is the root for `checkpoint.dir`.
        server: which it is on.
    """

    name: str
    server: S3Server

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    @property
    def options(self) -> dict[str, Any]:
        """`checkpoint.storage.options` of the server itself, where a test wants no environment variables."""
        return {"endpoint": self.server.endpoint, "region": REGION, "allow_http": True, **KEYS}

    def keys(self, prefix: str = "") -> list[str]:
        """All keys, sorted; asked of the server, not through the proxy."""
        return [item["path"] for page in self.store().list(prefix=prefix or None) for item in page]

    def age(self) -> None:
        """Make all that is in the bucket look some hours old, as it is when a job comes back."""
        self.server.request("POST", f"/{AGE}/{self.name}")

    def store(self, **options: Any) -> Any:
        """A store of obstore at the server, not through the proxy."""
        from obstore.store import S3Store

        given = {**self.options, **options}
        return S3Store(self.name, client_options={"allow_http": given.pop("allow_http")}, **given)


def _serve() -> None:
    import logging

    from flask import request
    from moto.s3.models import s3_backends
    from moto.server import create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = create_backend_app("s3")

    @app.before_request
    def age() -> Any:
        what, _, bucket = request.path.strip("/").partition("/")
        if what != AGE:
            return None
        for accounts in s3_backends.values():
            for backend in accounts.values():
                for key in backend.buckets[bucket].keys.values() if bucket in backend.buckets else ():
                    key.last_modified -= _HOURS
        return "aged"

    # moto looks whether there is an object and then puts it, so that of two puts at a time both may be the first one.
    one_at_a_time = threading.Lock()

    def atomic(environ: dict[str, Any], start_response: Any) -> Any:
        in_chunks = environ.get("wsgi.input_terminated")
        body = environ["wsgi.input"].read(*() if in_chunks else (int(environ.get("CONTENT_LENGTH") or 0),))
        environ["CONTENT_LENGTH"] = str(len(body))
        if environ.get(_GCS_CONDITION) == "0":
            environ["HTTP_IF_NONE_MATCH"] = "*"
        environ.setdefault("HTTP_AUTHORIZATION", "none")  # those of `gs://` are not signed
        with one_at_a_time:
            return app({**environ, "wsgi.input": io.BytesIO(body)}, start_response)

    server = make_server("127.0.0.1", 0, atomic, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _serve()
