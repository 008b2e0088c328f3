"""An SGLang server without a model: its routes for weights, answered as its own code does.

What follows which function of 0.5.23 (all in sglang/srt; older releases were read where they differ):

    /model_info                 entrypoints/http_server.py model_info. From 0.5.6 on.
    /update_weights_from_disk   model_executor/model_runner_components/weight_updater.py
                                WeightUpdater.update_weights_from_disk: a load that fails "rolls back" by reading the
                                *new* path again, which leaves the new weights where that works, and ends the scheduler
                                where it does not; both were seen with that function itself, run on a host.
                                managers/tokenizer_manager.py update_weights_from_disk: path and version move with
                                success alone; no success is status 400.
                                managers/scheduler_components/weight_updater.py flush_cache_after_weight_update: a flush
                                that is refused is status 400 with the new weights in place, and up to 0.5.21 an
                                assertion that ends the scheduler.
    /flush_cache                managers/scheduler.py flush_cache, is_fully_idle: 0.5.10 to 0.5.20 refuse it while
                                requests wait, even those that a pause put there.
    /weights_checker            utils/weight_checker.py WeightChecker.handle: from 0.5.6 on, with "checksum" from
                                0.5.12 on; what it does not know is status 400.
    /pause_generation           managers/io_struct.py PauseGenerationReqInput: abort, retract or in_place.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Answer = tuple[int, Any]
_NOT_FLUSHED = "Weights were updated, but the cache was not flushed because requests are still running or queued."
_FAILED = "Failed to update weights: {}.\nRolling back to original weights."


class SchedulerDiedError(Exception):
    """SGLang ends, and whoever asked gets no answer."""


class FakeSglang:
    """Remembers calls. ``refuses`` steps, by the beginning of their folder's name; ``spoils`` those that cannot be read
    a second time either; ``requests`` are in flight."""

    def __init__(self, release: tuple[int, int, int] = (0, 5, 23)) -> None:
        self.release, self.requests = release, 0
        self.calls: list[str] = []
        self.path, self.version, self.paused = "start", "default", False
        self.refuses: set[str] = set()
        self.spoils: set[str] = set()
        self.vanishes, self.fails = False, dict[str, int]()  # fails: {route: how often still}
        self.loses = False  # the answer to an update, once
        self.weights, self.checks = b"", True
        self.breaks: int | None = None  # how often a load until one goes wrong
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.spec = f"sglang=http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, route: str, body: dict[str, Any]) -> Answer:
        """Status and content of one POST."""
        self.calls.append(route)
        if self.fails.get(route, 0) > 0:
            self.fails[route] -= 1
            return 400, "no"
        if route == "/weights_checker":
            return self._checksums(body)
        if route == "/update_weights_from_disk":
            return self._update(body)
        if route == "/flush_cache":
            return (200, "Cache flushed.\n") if self._idle() else (400, "Flush cache failed.\n")
        if route == "/pause_generation":
            assert body["mode"] in ("abort", "retract", "in_place")
            self.requests *= body["mode"] != "abort"
        self.paused = {"/pause_generation": True, "/continue_generation": False}.get(route, self.paused)
        return 200, {}

    def _update(self, body: dict[str, Any]) -> Answer:
        path, name = body["model_path"], body["model_path"].split("/")[-1]
        self.load(path)
        if any(name.startswith(refused) for refused in self.spoils):
            self.weights = b"of no step"
            raise SchedulerDiedError
        if any(name.startswith(refused) for refused in self.refuses):
            return 400, {"success": False, "message": _FAILED.format("no such weights"), "num_paused_requests": 0}
        assert self.paused
        if body.get("flush_cache", True) and not self._idle():
            if self.release < (0, 5, 22):
                raise SchedulerDiedError
            return 400, {"success": False, "message": _NOT_FLUSHED, "num_paused_requests": 0}
        self.path = path
        self.version = body.get("weight_version", self.version)
        lost, self.loses = self.loses, False
        return (500 if lost else 200), {"success": True, "message": "", "num_paused_requests": 0}

    def _idle(self) -> bool:
        waiting_counts = (0, 5, 10) <= self.release < (0, 5, 21)
        return self.requests == 0 or (self.paused and not waiting_counts)

    def _checksums(self, body: dict[str, Any]) -> Answer:
        if not self.checks:
            return 404, {"detail": "Not Found"}
        if self.release < (0, 5, 12):
            return 400, {"success": False, "message": f"Unsupported action={body['action']!r}"}
        found = {"checksums": {"model.w": hashlib.sha256(self.weights).hexdigest()[:16]}}
        return 200, {"success": True, "message": "Success.", "ranks": [found]}

    def load(self, path: str) -> None:
        """What is in its memory, as a process of its own reads it."""
        files = sorted(Path(path).resolve().glob("*.safetensors"))
        if files:
            self.weights = b"".join(file.read_bytes() for file in files)
            if self.breaks is not None:
                self.breaks -= 1
                self.weights += b"broken" * (self.breaks == 0)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def _handler(fake: FakeSglang) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path == "/get_model_info" or fake.release >= (0, 5, 6)
            self.send(200 if known else 404, {"weight_version": fake.version, "model_path": fake.path})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
            try:
                self.send(*fake.answer(self.path, body))
            except SchedulerDiedError:
                fake.vanishes = True
                self.close_connection = True

        def send(self, status: int, body: Any) -> None:
            raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(503 if fake.vanishes else status)
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: Any) -> None: ...

    return Handler


@contextmanager
def fake_engines(*releases: tuple[int, int, int]) -> Iterator[list[FakeSglang]]:
    """Servers of these releases, while the block runs."""
    made = [FakeSglang(release) for release in releases]
    try:
        yield made
    finally:
        for fake in made:
            fake.close()
