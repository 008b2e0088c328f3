"""A step's trace by a real exporter, over HTTP, from processes that `opentelemetry-instrument` starts."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.fake_sglang import FakeSglang
from support.running import RUN, environment

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
pytest.importorskip("opentelemetry.distro")
pytest.importorskip("torch")

TRAINER = """
import sys
import torch
from deltackpt.hooks import TrainerHook

model = torch.nn.Linear(4, 4)
with TrainerHook(model, sys.argv[1]) as hook:
    hook.step(0)
"""


class Collector:
    """What an OpenTelemetry collector would get: by the service's name, its spans."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.spans: list[tuple[str, Any]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 60

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["content-length"]))
                raw = gzip.decompress(raw) if self.headers.get("content-encoding") == "gzip" else raw
                for of in ExportTraceServiceRequest.FromString(raw).resource_spans:
                    (name,) = (a.value.string_value for a in of.resource.attributes if a.key == "service.name")
                    collector.spans += [(name, span) for scope in of.scope_spans for span in scope.spans]
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@contextmanager
def collecting() -> Iterator[Collector]:
    made = Collector()
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        made.server.server_close()
        thread.join()


def traced(collector: Collector, service: str, script: str, *words: object) -> None:
    env = environment(
        OTEL_SERVICE_NAME=service,
        OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{collector.server.server_address[1]}",
        OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf",
        OTEL_TRACES_EXPORTER="otlp",
        OTEL_METRICS_EXPORTER="none",
        OTEL_LOGS_EXPORTER="none",
        PYTHONWARNINGS="ignore",
    )
    line = [str(Path(sys.executable).with_name("opentelemetry-instrument")), sys.executable, "-c", script]
    done = subprocess.run([*line, *map(str, words)], capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stderr


def test_one_trace_from_the_trainer_to_the_engine(tmp_path: Path) -> None:
    repo, fake = tmp_path / "repo", FakeSglang()
    try:
        with collecting() as collector:
            traced(collector, "trainer", TRAINER, repo)
            traced(collector, "follower", RUN, "follow", repo, tmp_path / "one", "--once")
            traced(collector, "server", RUN, "serve-updates", repo, tmp_path / "two", "--engine", fake.spec, "--once")
    finally:
        fake.close()
    assert fake.version == "0"
    found = {(service, span.name): span for service, span in collector.spans}
    began = found["trainer", "deltackpt.step"]
    assert not began.parent_span_id
    rest = found.keys() - {("trainer", "deltackpt.step")}
    assert rest == {
        ("trainer", "deltackpt.publish"),
        ("follower", "deltackpt.follow"),
        ("server", "deltackpt.follow"),
        ("server", "deltackpt.update"),
    }
    for key in rest:
        assert (found[key].trace_id, found[key].parent_span_id) == (began.trace_id, began.span_id)
        assert found[key].start_time_unix_nano >= began.start_time_unix_nano
