"""A proxy on loopback between a real client and a real server that misbehaves as told.

    with FaultyProxy(upstream).serve() as proxy:
        proxy.fail(Status(503, {"Retry-After": "1"}), "PUT", "patches/")
        ...  # a client whose endpoint is proxy.url

A fault is used up by the first request that matches, or by the first ``times``.
"""

from __future__ import annotations

import http.client
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True)
class Answer:
    """What goes back to the client; ``cut``: bytes of the body after which, ``later``, the connection is reset."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    cut: int | None = None
    later: float = 0.0


@dataclass(frozen=True)
class Status:
    """The server is not asked; this is the answer."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True)
class Reset:
    """The connection is reset; with ``answered``, only after the server did what it was asked."""

    answered: bool = False


@dataclass(frozen=True)
class Damage:
    """Bytes of the answer's body are changed: ``xor``-ed, or zeroed if that is 0."""

    offset: int
    length: int = 1
    xor: int = 0


@dataclass(frozen=True)
class Short:
    """The connection ends after so many bytes of the body, ``later`` seconds after them: a reset may overtake them."""

    length: int
    later: float = 0.0


@dataclass(frozen=True)
class Delay:
    """Seconds before the first byte."""

    seconds: float


@dataclass(frozen=True)
class Stale:
    """The answer that an equal request got when it was first seen."""


Fault = Status | Reset | Damage | Short | Delay | Stale


@dataclass
class _Planned:
    fault: Fault
    method: str
    path: re.Pattern[str]
    times: int


@dataclass
class FaultyProxy:
    upstream: str
    url: str = ""
    below: str = ""  # a path in front of all that the server knows of: the proxy's own
    mute: bool = False  # never say "100 Continue", which a client may wait for
    requests: list[tuple[float, str, str]] = field(default_factory=list)  # (time, method, path with its query)
    _planned: list[_Planned] = field(default_factory=list)
    _first: dict[tuple[str, str], Answer] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def serve(self) -> Iterator[FaultyProxy]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": self}))
        server.daemon_threads = True  # one may be asleep in a Delay
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def fail(self, fault: Fault, method: str = "", path: str = "", times: int = 1) -> None:
        """Plan a fault for requests of a method whose path matches somewhere."""
        with self._lock:
            self._planned.append(_Planned(fault, method, re.compile(path), times))

    def calm(self) -> None:
        """Forget all plans, and what was seen."""
        with self._lock:
            self._planned.clear()
            self._first.clear()
            self.requests.clear()

    def seen(self, method: str, path: str = "") -> list[float]:
        """When requests of a method whose path matches came."""
        return [at for at, m, p in self.requests if m == method and re.search(path, p)]

    def take(self, method: str, path: str) -> Fault | None:
        with self._lock:
            self.requests.append((time.monotonic(), method, path))
            for planned in self._planned:
                if planned.times and planned.method in ("", method) and planned.path.search(path):
                    planned.times -= 1
                    return planned.fault
        return None

    def hear(self, headers: Mapping[str, str]) -> None:
        """Told of the headers of each request."""

    def remember(self, method: str, path: str, answer: Answer) -> Answer:
        with self._lock:
            return self._first.setdefault((method, path), answer)


class _Handler(BaseHTTPRequestHandler):
    proxy: FaultyProxy
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def log_message(self, *args: object) -> None:
        pass

    def handle_any(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:  # the client gave up: the server must not wait for the rest
            return self.reset()
        path = unquote(self.path)
        self.proxy.hear(dict(self.headers.items()))
        fault = self.proxy.take(self.command, path)
        if isinstance(fault, Delay):
            time.sleep(fault.seconds)
        if isinstance(fault, Status):
            return self.answer(Answer(fault.status, list(fault.headers.items()), fault.body))
        if isinstance(fault, Reset) and not fault.answered:
            return self.reset()
        answer = self.forward(body)
        first = self.proxy.remember(self.command, path, answer)
        if isinstance(fault, Reset):
            return self.reset()
        return self.answer(damaged(first if isinstance(fault, Stale) else answer, fault))

    def handle_expect_100(self) -> bool:
        if not self.proxy.mute and super().handle_expect_100():
            self.wfile.flush()
        return True

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

    def forward(self, body: bytes) -> Answer:
        upstream = http.client.HTTPConnection(urlsplit(self.proxy.upstream).netloc, timeout=20)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
            upstream.request(self.command, self.path.removeprefix(self.proxy.below), body, headers)
            with upstream.getresponse() as answer:  # which holds the socket where it is not read to its end
                kept = [(n, v) for n, v in answer.getheaders() if n.lower() not in ("connection", "transfer-encoding")]
                return Answer(answer.status, kept, answer.read())
        finally:
            upstream.close()

    def answer(self, answer: Answer) -> None:
        named = {name.lower() for name, _ in answer.headers}
        try:
            self.send_response_only(answer.status)
            for name, value in answer.headers:
                self.send_header(name, value)
            if "content-length" not in named:
                self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body[: answer.cut])
            self.wfile.flush()
        except OSError:  # the client did not wait
            self.close_connection = True
        if answer.cut is not None:
            time.sleep(answer.later)
            self.reset()

    def reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()


def damaged(answer: Answer, fault: Fault | None) -> Answer:
    if isinstance(fault, Short):
        return Answer(answer.status, answer.headers, answer.body, min(fault.length, len(answer.body)), fault.later)
    if isinstance(fault, Damage):
        body = bytearray(answer.body)
        for at in range(fault.offset, min(fault.offset + fault.length, len(body))):
            body[at] = body[at] ^ fault.xor if fault.xor else 0
        return Answer(answer.status, answer.headers, bytes(body))
    return answer
