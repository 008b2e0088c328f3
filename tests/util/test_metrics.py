"""Metrics: one scheme of names, times that pass by themselves, and what dashboards, rules and documents name."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from deltackpt import __version__
from deltackpt.errors import ChainError, NotFoundError, StoreError, UsageError
from deltackpt.util.metrics import KINDS, Metrics, address

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"\bdeltackpt_[a-z_]+")


def values(metrics: Metrics) -> dict[str, float]:
    lines = [line for line in metrics.text().splitlines() if line and not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_counters_begin_at_zero_and_the_role_is_told() -> None:
    found = values(Metrics("follow"))
    assert found[f'deltackpt_info{{role="follow",version="{__version__}"}}'] == 1
    assert [found[f"deltackpt_{name}_total"] for name in ("steps", "bytes", "retries", "failures")] == [0, 0, 0, 0]
    assert values(Metrics()) == {}


def test_behind_grows_by_itself_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "time", lambda: clock[0] + 5_000)
    metrics = Metrics("follow")
    assert "deltackpt_behind_seconds" not in metrics.text()
    metrics.seen()

    def behind(after: float) -> tuple[float, float]:
        clock[0] += after
        found = values(metrics)
        return found["deltackpt_behind_seconds"], found["deltackpt_unseen_seconds"]

    assert behind(0) == (0, 0)
    assert behind(30) == (30, 30)  # it hangs, or the store does not answer: who knows what is there
    metrics.seen()
    assert behind(0) == (0, 0)
    metrics.late()
    assert behind(10) == (10, 10)
    metrics.late()  # still the same one, or another: since then something newer is there
    assert behind(5) == (15, 5)
    metrics.late(clock[0] + 5_000 - 60)  # now it is known when it was published
    assert behind(0) == (60, 0)
    metrics.late(clock[0] + 5_000 - 10)  # an even newer one
    assert behind(2) == (62, 2)
    metrics.seen()
    metrics.late(clock[0] + 9_999)  # by a clock that is ahead
    assert behind(1) == (1, 1)
    metrics.seen()
    assert behind(0) == (0, 0)


def test_behind_is_never_told_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    metrics = Metrics("follow")
    metrics.seen()

    def behind(after: float) -> float:
        clock[0] += after
        return values(metrics)["deltackpt_behind_seconds"]

    assert behind(300) == 300  # the store did not answer
    metrics.late()  # when what is there now was published is not known
    assert behind(0) == 300
    asked = clock[0]
    assert behind(100) == 400  # a move of 100 s, and nobody looked
    metrics.seen(asked)
    assert behind(0) == 100
    metrics.seen()
    metrics.unused(clock[0] - 50)
    assert behind(0) == 50
    metrics.seen()
    assert behind(1) == 51
    metrics.unused(None)
    assert behind(0) == 1


def test_what_is_a_failure() -> None:
    metrics = Metrics("follow")
    said = {"where": "w", "have": "h", "need": "n"}
    for error in (StoreError("store-busy", **said), NotFoundError("branch-empty", **said)):
        metrics.retry(error)
    assert (values(metrics)["deltackpt_retries_total"], values(metrics)["deltackpt_failures_total"]) == (2, 0)
    metrics.retry(ChainError("signature-missing", **said))
    assert (values(metrics)["deltackpt_retries_total"], values(metrics)["deltackpt_failures_total"]) == (3, 1)


def test_names_are_of_one_scheme() -> None:
    for name, (kind, said) in KINDS.items():
        assert NAME.fullmatch(name)
        assert (kind == "counter") == name.endswith("_total")
        assert said.endswith(".")
        assert name.endswith(("_total", "_seconds", "_steps", "_step", "_info", "_wedged"))


def test_what_is_counted_anywhere_is_exported() -> None:
    """A name that is not in the list would be counted, and shown to nobody."""
    files = [*(ROOT / "deltackpt").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]
    counted = re.compile(r'\.(?:set|add|ask)\(\s*"(deltackpt_[a-z_]+)"')
    named = {name for file in files for name in counted.findall(file.read_text())}
    assert named <= KINDS.keys()
    assert KINDS.keys() - named == {"deltackpt_info", "deltackpt_unseen_seconds"}


def test_what_is_served_can_be_read_by_the_client_library() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    metrics = Metrics("serve-updates")
    metrics.seen()
    metrics.set("deltackpt_step", 3, 'a"b\\c\nd')
    metrics.ask("deltackpt_queue_steps", lambda: 2.0)
    families = {family.name: family for family in parser.text_string_to_metric_families(metrics.text())}
    assert families["deltackpt_step"].samples[0].labels == {"engine": 'a"b\\c\nd'}
    assert families["deltackpt_queue_steps"].samples[0].value == 2
    assert families["deltackpt_steps"].type == "counter"


def test_a_port() -> None:
    with Metrics("watch").on(0) as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            assert b'role="watch"' in answer.read()
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60)
        refused.value.close()
        with pytest.raises(StoreError, match="port-taken"), Metrics().on(port):
            pass
    with socket.socket() as free:  # it is free again
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port or 0))
    with pytest.raises(UsageError), Metrics().on(70_000):
        pass
    with pytest.raises(StoreError, match="port-taken"), Metrics().on("no-such-host.invalid:0"):
        pass
    with Metrics("watch").on("0.0.0.0:0") as port:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).close()
    with Metrics().on(None) as none:
        assert none is None


@pytest.mark.parametrize(
    ("place", "want"),
    [
        (9, ("127.0.0.1", 9)),
        ("9", ("127.0.0.1", 9)),
        (":9", ("127.0.0.1", 9)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("[::1]:65535", ("::1", 65535)),
        ("host:0", ("host", 0)),
    ],
)
def test_addresses(place: int | str, want: tuple[str, int]) -> None:
    assert address(place) == want


@pytest.mark.parametrize("place", [-1, 65536, "", "http", "1.2", "host", "host:", "9:x", "+9", "٣", "000009"])
def test_what_is_no_address(place: int | str) -> None:
    with pytest.raises(UsageError):
        address(place)


def test_rules_dashboard_and_document_name_what_is_exported() -> None:
    rules = (ROOT / "examples/alerts.yml").read_text()
    dashboard = json.loads((ROOT / "examples/grafana-dashboard.json").read_text())
    drawn = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    for text in (rules, drawn):
        named = set(NAME.findall(text))
        assert named
        assert named <= KINDS.keys()
    assert set(NAME.findall((ROOT / "docs/operate/metrics.md").read_text())) == KINDS.keys()
    unshown = {"deltackpt_pause_seconds_total", "deltackpt_updates_total"}
    assert set(NAME.findall(rules + drawn)) >= KINDS.keys() - unshown
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool")
def test_rules_are_rules() -> None:
    subprocess.run(["promtool", "check", "rules", ROOT / "examples/alerts.yml"], check=True, timeout=60)
