"""A server that answers every request in the same bytes, then at the pace that it is given."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"  # of a body that is yet to come
ANSWERS = {
    "another protocol": b"SSH-2.0-OpenSSH_9.6\r\n",
    "no answer": b"",
    "a body cut short": b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nabc",
    "a chunk cut short": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10\r\nabc",
    "a chunk of no length": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc",
    "too many headers": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 500 + b"\r\n",
    "an error cut short": b"HTTP/1.1 500 Oh\r\nContent-Length: 1000\r\n\r\nabc",
}


def page(body: bytes) -> bytes:
    """A whole answer."""
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


@contextmanager
def answering(data: bytes, *, then_every: float | None = None) -> Iterator[str]:
    """The URL of the server while the block runs. With ``then_every`` a byte follows every so many seconds."""
    ended = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.settimeout(10)
            with suppress(OSError):
                self.request.recv(65536)
                self.request.sendall(data)
                while then_every is not None and not ended.wait(then_every):
                    self.request.sendall(b"x")

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            ended.set()
            server.shutdown()
