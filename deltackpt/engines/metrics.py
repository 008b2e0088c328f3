"""What the follower of a host counts, in the text format of Prometheus, on a port."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_KINDS = {
    "deltackpt_step": ("gauge", "The step that an engine, or the cache, is at."),
    "deltackpt_lag_steps": ("gauge", "Steps between an engine and the newest one that is in the cache."),
    "deltackpt_lag_seconds": (
        "gauge",
        "From the publication of a step to its use by an engine, or until now where it is behind.",
    ),
    "deltackpt_pause_seconds": ("gauge", "How long the last update stopped an engine."),
    "deltackpt_pause_seconds_total": ("counter", "How long updates stopped an engine, in all."),
    "deltackpt_updates_total": ("counter", "Updates that an engine took."),
    "deltackpt_failures_total": ("counter", "Updates that an engine did not take."),
    "deltackpt_bytes_total": ("counter", "Bytes read from the repository."),
    "deltackpt_unseen_seconds": ("gauge", "Since the repository was last seen, and the cache at its newest step."),
    "deltackpt_wedged": ("gauge", "1 for an engine whose weights are those of no step."),
}


class Metrics:
    """Gauges and counters by name, and by engine where one is named; used by any thread."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()

    def set(self, name: str, value: float, engine: str = "") -> None:
        """Set a gauge."""
        with self._lock:
            self._values[name, engine] = value

    def add(self, name: str, value: float, engine: str = "") -> None:
        """Add to a counter."""
        with self._lock:
            self._values[name, engine] = self._values.get((name, engine), 0) + value

    def text(self) -> str:
        """All of them, in the text format of Prometheus."""
        with self._lock:
            values = dict(self._values)
        lines = []
        for name, (kind, help_) in _KINDS.items():
            found = sorted((engine, value) for (n, engine), value in values.items() if n == name)
            if found:
                lines += [f"# HELP {name} {help_}", f"# TYPE {name} {kind}"]
            for engine, value in found:
                label = engine.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
                lines.append(f'{name}{{engine="{label}"}} {value}' if engine else f"{name} {value}")
        return "\n".join(lines) + "\n"

    @contextmanager
    def on(self, port: int | None, host: str = "127.0.0.1") -> Iterator[int | None]:
        """Serve them while the block runs; -> the port, where 0 asked for any."""
        if port is None:
            yield None
            return
        metrics = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                here = self.path.partition("?")[0] == "/metrics"
                body = metrics.text().encode() if here else b""
                self.send_response(200 if here else 404)
                self.send_header("content-type", "text/plain; version=0.0.4")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None: ...

        with ThreadingHTTPServer((host, port), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            try:
                yield server.server_address[1]
            finally:
                server.shutdown()
                thread.join()
