"""What a long-running process counts, in the text format of Prometheus, on a port: one scheme of names for all of them.

A name ends with its unit, a counter with `_total`. Times that pass by themselves are worked out when they are asked
for, so that a process that hangs shows it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Final

from deltackpt.errors import DeltackptError, StoreError, UsageError

KINDS: Final[Mapping[str, tuple[str, str]]] = {
    "deltackpt_info": ("gauge", "1, with what this process does, and the version."),
    "deltackpt_step": ("gauge", "The step that an engine, or the cache, is at; the last one published or copied."),
    "deltackpt_behind_seconds": (
        "gauge",
        "For how long at most a newer step has been waiting to be published, copied or used; 0 where there is none.",
    ),
    "deltackpt_unseen_seconds": ("gauge", "Since the repository, or the directory that is watched, was last seen."),
    "deltackpt_lag_steps": ("gauge", "Steps between an engine and the newest one that is in the cache."),
    "deltackpt_lag_seconds": (
        "gauge",
        "From the publication of a step to its use by an engine or in a cache; of an engine that is behind, since the "
        "first step that it lacks was published.",
    ),
    "deltackpt_steps_total": ("counter", "Steps published, copied, or taken into the cache."),
    "deltackpt_bytes_total": ("counter", "Bytes read from the repository; of what publishes or copies, written."),
    "deltackpt_work_seconds_total": ("counter", "Time spent on these steps."),
    "deltackpt_stall_seconds_total": ("counter", "How long training stood still for its steps."),
    "deltackpt_queue_steps": ("gauge", "Steps that are captured and not published yet."),
    "deltackpt_changed_elements_total": ("counter", "Elements that the published steps changed."),
    "deltackpt_retries_total": ("counter", "Attempts that failed and are made again."),
    "deltackpt_failures_total": (
        "counter",
        "Steps that were not taken by an engine or the command of --exec, or failed to be read, published or copied.",
    ),
    "deltackpt_pause_seconds": ("gauge", "How long the last update stopped an engine."),
    "deltackpt_pause_seconds_total": ("counter", "How long updates stopped an engine, in all."),
    "deltackpt_updates_total": ("counter", "Updates that an engine took."),
    "deltackpt_wedged": ("gauge", "1 for an engine whose weights are those of no step."),
}
ABSENT: Final = frozenset({"repository-missing", "bucket-missing", "ref-missing", "watch-missing", "branch-empty"})
BEGUN: Final = ("deltackpt_steps_total", "deltackpt_bytes_total", "deltackpt_retries_total", "deltackpt_failures_total")


class Metrics:
    """Gauges and counters by name, and by engine where one is named; used by any thread.

    ``role``: what the process does, `follow` and the like; its counters then begin at 0, so that the first of a kind is
    seen as an increase.
    """

    def __init__(self, role: str = "") -> None:
        self._values: dict[tuple[str, str], float] = dict.fromkeys([(name, "") for name in BEGUN], 0) if role else {}
        self._found: dict[str, Callable[[], float]] = {}
        self._role = role
        self._seen: float | None = None  # by the monotonic clock
        self._clear: float | None = None  # when nothing newer was there
        self._unused: float | None = None  # since when what was seen is not used everywhere
        self._lock = threading.Lock()

    def set(self, name: str, value: float, engine: str = "") -> None:
        """Set a gauge."""
        with self._lock:
            self._values[name, engine] = value

    def add(self, name: str, value: float, engine: str = "") -> None:
        """Add to a counter."""
        with self._lock:
            self._values[name, engine] = self._values.get((name, engine), 0) + value

    def ask(self, name: str, value: Callable[[], float]) -> None:
        """A gauge that is worked out when it is asked for, by another thread."""
        with self._lock:
            self._found[name] = value

    def seen(self, asked: float | None = None) -> None:
        """What is followed was seen just now, and nothing newer than what is here; or following begins.

        ``asked``: when it was seen, by the monotonic clock, if what is newest was copied or used since then.
        """
        with self._lock:
            self._seen = time.monotonic()
            self._clear = self._seen if asked is None else asked

    def late(self, since: float | None = None) -> None:
        """What is followed was seen just now, and something newer is there: since it was last seen without, or at least
        ``since`` (seconds since 1970). That an even newer one comes makes it no less late."""
        with self._lock:
            self._seen = now = time.monotonic()
            known = [] if self._clear is None else [self._clear]
            self._clear = min([*known, now if since is None else now - max(0.0, time.time() - since)])

    def unused(self, since: float | None) -> None:
        """What was seen is not used by all, ``since`` (by the monotonic clock); None: it is."""
        with self._lock:
            self._unused = since

    def retry(self, error: BaseException) -> None:
        """An attempt failed and is made again; it is no step's failure that a store does not answer, or has nothing."""
        silent = isinstance(error, StoreError) or (isinstance(error, DeltackptError) and error.code in ABSENT)
        self.add("deltackpt_retries_total", 1)
        self.add("deltackpt_failures_total", int(not silent))

    def text(self) -> str:
        """All of them, in the text format of Prometheus."""
        found = {name: value() for name, value in list(self._found.items())}
        with self._lock:
            values = dict(self._values) | {(name, ""): value for name, value in found.items()}
            if self._seen is not None and self._clear is not None:
                now, late = time.monotonic(), [self._clear] + ([] if self._unused is None else [self._unused])
                values["deltackpt_unseen_seconds", ""] = now - self._seen
                values["deltackpt_behind_seconds", ""] = now - min(late)
        lines = []
        for name, (kind, help_) in KINDS.items():
            mine = sorted((engine, value) for (n, engine), value in values.items() if n == name)
            if mine or (name == "deltackpt_info" and self._role):
                lines += [f"# HELP {name} {help_}", f"# TYPE {name} {kind}"]
            if name == "deltackpt_info" and self._role:
                lines.append(f'{name}{{role="{self._role}",version="{_version()}"}} 1')
            for engine, value in mine:
                label = engine.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
                lines.append(f'{name}{{engine="{label}"}} {value}' if engine else f"{name} {value}")
        return "\n".join(lines) + "\n"

    @contextmanager
    def on(self, port: int | str | None) -> Iterator[int | None]:
        """Serve them while the block runs, as `address` says where; -> the port, where 0 asked for any.

        Raises UsageError ``usage`` for an address that is none, StoreError ``port-taken`` for a port that is in use.
        """
        if port is None:
            yield None
            return
        server = _server(self, *address(port))
        with server:
            thread = threading.Thread(target=server.serve_forever, name="deltackpt-metrics", daemon=True)
            thread.start()
            try:
                yield server.server_address[1]
            finally:
                server.shutdown()
                thread.join()


def address(place: int | str) -> tuple[str, int]:
    """Host and port of ``PORT``, which is of loopback, or of ``HOST:PORT``; 0.0.0.0 and [::] are all interfaces.

    Raises UsageError ``usage`` for anything else.
    """
    host, _, port = str(place).rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 1 << 16):
        raise UsageError(
            "usage", where="metrics port", have=repr(place)[:80], need="a port from 0 to 65535, or HOST:PORT"
        )
    return host or "127.0.0.1", int(port)


def _server(metrics: Metrics, host: str, port: int) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        timeout = 30  # seconds: a client that says nothing holds a thread no longer

        def do_GET(self) -> None:
            here = self.path.partition("?")[0] == "/metrics"
            body = metrics.text().encode() if here else b""
            self.send_response(200 if here else 404)
            self.send_header("content-type", "text/plain; version=0.0.4")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def server_bind(self) -> None:
            TCPServer.server_bind(self)  # HTTPServer's asks a name server for the host's name

    try:
        return Server((host, port), Handler)
    except (OSError, UnicodeError) as error:
        have, need = getattr(error, "strerror", None) or str(error), "a port that is free"
        raise StoreError("port-taken", where=f"{host}:{port}", have=have, need=need) from error


def _version() -> str:
    from deltackpt import __version__

    return __version__
