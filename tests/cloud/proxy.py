"""A proxy in front of an S3 server that knows its requests, and breaks those that a test chooses.

    proxy.add(CutAfter(), nth=3)                                     the third request from now on
    proxy.add(Answer(503), where=lambda r: r.key.endswith("manifest.json"), times=2)
    proxy.bytes_per_second = 20e6
    proxy.stop(); proxy.start()                                      as a server that is killed and comes back

Requests are read whole before they are passed on, so that each is either not seen by the server or seen whole. What is
on its way when the proxy stops is cut.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

_PIECE = 64 << 10
_REPLY_SECONDS = 60.0
_CODES = {
    403: "AccessDenied",
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    500: "InternalError",
    503: "SlowDown",
}
_HOP = {"connection", "keep-alive", "transfer-encoding", "date", "server", "content-length", "expect"}


@dataclass
class Request:
    """One request, as the log has it.

    Attributes:
        number: from 1 on, in the order in which the requests were read whole.
        bucket, key, query: what it is about.
        headers: in lower case.
        status: what the client was answered; None: not yet, or nothing.
    """

    number: int
    method: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str] = field(repr=False)
    body: bytes = field(repr=False)
    status: int | None = None

    @property
    def kind(self) -> str:
        """What it does, in the words of S3's documentation."""
        if self.method in ("PUT", "DELETE") and not self.key:
            return f"{self.method} bucket"
        if self.method == "POST":
            return "delete objects" if "delete" in self.query else _of_multipart(self.query, "complete", "create")
        if "uploadId" in self.query:
            return {"PUT": "upload part", "DELETE": "abort multipart"}.get(self.method, "list parts")
        if self.method == "PUT":
            return "put new" if "if-none-match" in self.headers else "put"
        if self.method == "GET" and not self.key:
            return "list"
        return self.method.lower()

    def __str__(self) -> str:
        return f"{self.number}: {self.kind} {self.key or self.query.get('prefix', '')} -> {self.status}"


def _of_multipart(query: dict[str, str], with_id: str, without: str) -> str:
    return f"{with_id if 'uploadId' in query else without} multipart"


@dataclass(frozen=True)
class Reply:
    """What the server, or the proxy in its place, answers."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    cut: int | None = None  # the connection is cut after so many bytes of the body


class Fault:
    """What is done to a request; this one does nothing."""

    def handle(self, request: Request, send: Callable[[], Reply]) -> Reply | None:
        """The reply for the client, or None: the connection is cut; `send` passes the request on to the server."""
        return send()


class CutBefore(Fault):
    """The connection is cut before the server has seen the request."""

    def handle(self, request: Request, send: Callable[[], Reply]) -> Reply | None:
        return None


class CutAfter(Fault):
    """The server does what it was asked, and the answer is lost."""

    def handle(self, request: Request, send: Callable[[], Reply]) -> Reply | None:
        send()
        return None


@dataclass(frozen=True)
class CutBody(Fault):
    """The connection is cut in the middle of the answer."""

    def handle(self, request: Request, send: Callable[[], Reply]) -> Reply | None:
        reply = send()
        return Reply(reply.status, reply.headers, reply.body, cut=len(reply.body) // 2)


@dataclass
class Duplicate(Fault):
    """The server gets the request twice; the client gets the first answer, or the second one, of `second=True`."""

    second: bool = False

    def handle(self, request: Request, send: Callable[[], Reply]) -> Reply | None:
        replies = send(), send()
        return replies[self.second]


@dataclass
class Delay(Fault):
    """The server gets the request some seconds later, or when `until` is set if that is earlier."""

    seconds: float
    until: threading.Event = field(default_factory=threading.Event)

    def handle(self, request: Request, send: Callable[[], Reply]) -> Reply | None:
        self.until.wait(self.seconds)
        return send()


@dataclass
class Answer(Fault):
    """The server does not see the request, and the client is answered an error of S3."""

    status: int

    def handle(self, request: Request, send: Callable[[], Reply]) -> Reply | None:
        code = _CODES[self.status]
        body = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>by the test</Message></Error>"
        return Reply(self.status, [("Content-Type", "application/xml")], body.encode())


@dataclass
class Strip(Fault):
    """The server does not see a header, such as `if-none-match`."""

    header: str

    def handle(self, request: Request, send: Callable[[], Reply]) -> Reply | None:
        request.headers.pop(self.header, None)
        return send()


@dataclass
class Call(Fault):
    """Something is done before the request is passed on."""

    action: Callable[[Request], Any]

    def handle(self, request: Request, send: Callable[[], Reply]) -> Reply | None:
        self.action(request)
        return send()


@dataclass
class Rule:
    """Which requests a fault is applied to; `hits` are those that it was applied to."""

    fault: Fault
    nth: int
    times: int | None
    where: Callable[[Request], bool]
    seen: int = 0
    hits: list[Request] = field(default_factory=list)

    def takes(self, request: Request) -> bool:
        if not self.where(request):
            return False
        self.seen += 1
        if self.seen < self.nth or (self.times is not None and self.seen >= self.nth + self.times):
            return False
        self.hits.append(request)
        return True


class FaultProxy:
    """The proxy; its own threads answer until `close`.

    Args:
        upstream: port of the server on 127.0.0.1.

    Attributes:
        bytes_per_second: of the bodies of all requests and replies together; None: as fast as it can.
    """

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self.bytes_per_second: float | None = None
        self.port = 0
        self.errors: list[BaseException] = []
        self._lock = threading.Lock()
        self._log: list[Request] = []
        self._rules: list[Rule] = []
        self._free_at = 0.0
        self._server: _Server | None = None
        self.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> list[Request]:
        """The requests so far."""
        with self._lock:
            return list(self._log)

    def clear(self) -> None:
        """Forget the requests and the rules, and count requests from 1 again."""
        with self._lock:
            self._log, self._rules = [], []

    def add(
        self, fault: Fault, *, nth: int = 1, times: int | None = 1, where: Callable[[Request], bool] = lambda r: True
    ) -> Rule:
        """Apply a fault to `times` requests from the `nth` on that `where` is true of (`times=None`: to all of them).

        Of several rules the first one that takes a request applies.
        """
        rule = Rule(fault, nth, times, where)
        with self._lock:
            self._rules.append(rule)
        return rule

    def start(self) -> None:
        """Listen, on the same port as before."""
        assert self._server is None
        self._server = _Server(self, self.port)
        self.port = self._server.server_port

    def stop(self) -> None:
        """Cut all connections, and refuse new ones until `start`."""
        if self._server is not None:
            self._server.end()
            self._server = None

    def close(self) -> None:
        """Stop; raises what went wrong in the proxy itself."""
        self.stop()
        for error in self.errors:
            raise error

    # For the connections

    def fault_of(self, method: str, target: str, headers: dict[str, str], body: bytes) -> tuple[Request, Fault]:
        parts = urlsplit(target)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        with self._lock:
            request = Request(len(self._log) + 1, method, bucket, key, query, headers, body)
            self._log.append(request)
            return request, next((rule.fault for rule in self._rules if rule.takes(request)), Fault())

    def pace(self, size: int, ended: threading.Event) -> None:
        """Wait until the line is free for so many bytes more."""
        rate = self.bytes_per_second
        if rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + size / rate
            pause = self._free_at - now
        ended.wait(pause)


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, proxy: FaultProxy, port: int) -> None:
        self.proxy = proxy
        self.ended = threading.Event()
        self._connections: set[socket.socket] = set()
        self._guard = threading.Lock()
        super().__init__(("127.0.0.1", port), _Connection)
        self.socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * _PIECE
        )  # else the kernel takes what is throttled
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), name="s3 proxy")
        self._thread.start()

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.socket.getsockname()[:2]  # without asking for the name of 127.0.0.1

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        with self._guard:
            self._connections.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        with self._guard:
            self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep what is not a connection that the other side, or `end`, cut, for `close`."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, (ConnectionError, TimeoutError)):
            self.proxy.errors.append(error)

    def end(self) -> None:
        self.ended.set()
        self.shutdown()
        self._thread.join()
        self.socket.close()
        with self._guard:
            for connection in self._connections:
                _reset(connection)


class _Connection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def _pass(self) -> None:
        proxy, ended = self.server.proxy, self.server.ended
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = b"".join(self._pieces(headers))
        request, fault = proxy.fault_of(self.command, self.path, headers, body)

        def send() -> Reply:
            if ended.is_set():
                raise ConnectionAbortedError("the proxy was stopped")
            return self._ask(request)

        reply = fault.handle(request, send)
        if reply is None or ended.is_set():
            self.close_connection = True
            _reset(self.connection)
            return
        request.status = reply.status
        self._answer(reply)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass

    def _pieces(self, headers: dict[str, str]) -> Iterator[bytes]:
        """The body of the request, at the proxy's rate; what came in chunks is put together."""
        if "chunked" in headers.get("transfer-encoding", ""):
            while size := int(self.rfile.readline().partition(b";")[0], 16):
                yield from self._read(size)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
        else:
            yield from self._read(int(headers.get("content-length", 0)))

    def _read(self, size: int) -> Iterator[bytes]:
        while size:
            piece = self.rfile.read(min(size, _PIECE))
            if not piece:
                raise ConnectionAbortedError("the client left in the middle of a request")
            size -= len(piece)
            self.server.proxy.pace(len(piece), self.server.ended)
            yield piece

    def _ask(self, request: Request) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.proxy.upstream, timeout=_REPLY_SECONDS)
        with contextlib.closing(connection):
            # A request to Azure has its date signed.
            headers = {name: value for name, value in request.headers.items() if name not in _HOP or name == "date"}
            connection.request(request.method, self.path, request.body or None, headers)
            answer = connection.getresponse()
            return Reply(answer.status, answer.getheaders(), answer.read())

    def _answer(self, reply: Reply) -> None:
        self.send_response_only(reply.status)
        lengths = [value for name, value in reply.headers if name.lower() == "content-length"]
        for name, value in reply.headers:
            if name.lower() not in _HOP:
                self.send_header(name, value)
        # That of a HEAD is of a body that does not come.
        length = lengths[0] if self.command == "HEAD" and lengths else str(len(reply.body))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            body = reply.body[: reply.cut]
            for begin in range(0, len(body), _PIECE):
                piece = body[begin : begin + _PIECE]
                self.server.proxy.pace(len(piece), self.server.ended)
                self.wfile.write(piece)
        if reply.cut is not None:
            self.close_connection = True
            _reset(self.connection)

    def log_message(self, format: str, *args: Any) -> None:
        """The log is `FaultProxy.log`."""


def _reset(connection: socket.socket) -> None:
    """Cut a connection so that the other side gets ECONNRESET and does not wait."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)


def kinds(requests: Sequence[Request]) -> list[str]:
    """What requests did, in order."""
    return [request.kind for request in requests]
