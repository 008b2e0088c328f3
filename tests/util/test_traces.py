"""A step is one trace, from the trainer to what takes it in; without OpenTelemetry there is nothing of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.running import ROOT, environment

from deltackpt.util.traces import TRACEPARENT, with_trace

# In a process of its own: a tracer provider is set once for all of a process.
TRACED = """
import sys
from pathlib import Path
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from deltackpt.errors import StoreError
from deltackpt.hooks import TrainerHook
from deltackpt.repository import Repository
from deltackpt.sync.follow import Follower
from deltackpt.util.traces import span

spans = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(provider)
work = Path(sys.argv[1])
model = torch.nn.Linear(4, 4)
given = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
with TrainerHook(model, work / "repo") as hook:
    hook.step(0)
    with torch.no_grad():
        model.weight += 1
    hook.step(1, metadata={"traceparent": given, "more": 2})
repo = Repository.open(work / "repo")
for step in (0, 1):
    follower = Follower(repo, work / f"cache-{step}")
    follower._move(repo.find(step))
first, second = (repo.load(repo.find(step)).metadata for step in (0, 1))
assert second == {"traceparent": given, "more": 2}
for broken in ("00-zz", 7, None, "00-" + "0" * 32 + "-" + "0" * 16 + "-00"):
    with span("deltackpt.follow", {"traceparent": broken}):
        pass
try:
    with span("failing"):
        raise StoreError("store-busy", where="s3://key:secret@host", have="a", need="b")
except StoreError:
    pass
done = spans.get_finished_spans()
assert not any("secret" in one.to_json() for one in done)
assert [one.status.description for one in done if one.name == "failing"] == ["store-busy"]
ids = {}
for one in done:
    if one.attributes.get("deltackpt.step") is not None:
        ids.setdefault(one.attributes["deltackpt.step"], {})[one.name] = one
for step, found in ids.items():
    assert found.keys() == {"deltackpt.step", "deltackpt.publish", "deltackpt.follow"}, found
    (trace_id,) = {one.context.trace_id for one in found.values()}
    want = first["traceparent"].split("-")[1] if step == 0 else "ab" * 16
    assert f"{trace_id:032x}" == want
assert ids.keys() == {0, 1}
print("traced")
"""
PLAIN = """
import sys
from deltackpt.util.traces import span
with span("deltackpt.step", {"traceparent": "x"}) as traced:
    assert traced is None
assert "opentelemetry" not in sys.modules
print("plain")
"""


def ran(script: str, *words: object) -> str:
    line = [sys.executable, "-c", script, *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, env=environment(), timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_step_is_one_trace(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    pytest.importorskip("torch")
    assert ran(TRACED, tmp_path) == "traced\n"


def test_without_it_nothing_is_imported() -> None:
    assert ran(PLAIN) == "plain\n"


def test_what_a_script_gives_is_kept() -> None:
    assert with_trace(None, None) is None
    assert with_trace({"a": 1}, None) == {"a": 1}
    assert with_trace({"a": 1}, "x") == {TRACEPARENT: "x", "a": 1}
    assert with_trace({TRACEPARENT: "mine"}, "x") == {TRACEPARENT: "mine"}
