"""What a report says of a branch is what manifests, tables and payloads hold; of these none unless asked for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from deltackpt_cli.sparklines import lines, spark
from support.counting_store import CountingStore
from support.running import deltackpt

from deltackpt.errors import FormatError, NotFoundError
from deltackpt.report.arrivals import MAX_LINE, read_arrivals
from deltackpt.report.history import read_history, spread
from deltackpt.report.inspection import inspect_step
from deltackpt.report.layers import model_order
from deltackpt.report.log import log
from deltackpt.report.ulp_steps import CLASSES, ulp_steps
from deltackpt.repository import Repository
from deltackpt.repository.leases import lease
from deltackpt.restore.patch_reader import PatchReader


def test_steps_layers_and_encodings(report_repo: Path) -> None:
    opened = Repository.open(report_repo)
    found = read_history(opened)
    assert found.steps == log(opened).steps[::-1]
    assert [name for name in found.layers if "x^2" not in name] == [
        "model.embed_tokens", "model.layers.0", "model.layers.9", "model.layers.10", "model.norm", "lm_head"
    ]  # fmt: skip
    assert sum(found.layers.values()) == found.steps[-1].elements
    for table in found.tables:
        want = inspect_step(opened, table.step)
        assert sum(table.layers.values()) == want.changed
        assert table.layers["model.layers.0"] == 64
        assert sum(share.changed for share in table.encodings.values()) == want.changed
        for name, share in table.encodings.items():
            mine = [t for t in want.tensors if t.encoding == name]
            assert (share.entries, share.bytes) == (len(mine), sum(t.bytes for t in mine))
    assert json.loads(json.dumps(found.to_dict()))["tables"][0]["step"] == 1


def test_restore_costs_are_those_of_the_plans(report_repo: Path) -> None:
    opened = Repository.open(report_repo)
    for cost in read_history(opened).restore:
        plan = opened.resolve(opened.find(cost.step))
        assert (cost.bytes, cost.hops) == (plan.bytes, len(plan.patches))


def test_milestones_storage_and_gc(report_repo: Path) -> None:
    found = read_history(Repository.open(report_repo))
    assert [(m.kind, m.start, m.step, m.name) for m in found.milestones] == [
        ("anchor", None, 0, ""), ("tag", None, 3, "best"), ("fold", 0, 4, ""), ("anchor", None, 5, ""),
        ("branch", None, 6, "main"),
    ]  # fmt: skip
    sizes: dict[str, int] = {}
    for path in (path for path in report_repo.rglob("*") if path.is_file()):
        folder = path.relative_to(report_repo).parts[0]
        sizes[folder] = sizes.get(folder, 0) + path.stat().st_size
    assert found.storage == {name: sizes[name] for name in found.storage}
    assert (found.gc_frees, found.gc_steps) == (0, 0)


def test_a_reader_that_is_behind(report_repo: Path) -> None:
    opened = Repository.open(report_repo)
    with lease(opened, opened.find(6), have=opened.find(2)):
        (holder,) = read_history(opened).holders
    assert (holder.step, holder.behind) == (2, 4)
    assert holder.seconds is not None
    assert holder.seconds >= 0
    assert read_history(opened).holders == ()


def test_ulp_steps_are_those_of_the_weights(report_repo: Path) -> None:
    opened = Repository.open(report_repo)
    found = ulp_steps(opened, opened.find(3))
    assert found is not None
    assert sum(found.up) + sum(found.down) == 64 + 2 * 12
    assert found.up[CLASSES.index("2")] + found.down[CLASSES.index("2")] == 2 * 12
    assert found.up[0] + found.down[0] == 64
    assert ulp_steps(opened, opened.find(0)) is None
    assert [one.step for one in read_history(opened, ulp=True).ulp] == [1, 2, 3, 4, 5, 6]


def test_no_payload_is_read_unless_asked_for(report_repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a part was read whole")

    monkeypatch.setattr(PatchReader, "arriving", refuse)
    monkeypatch.setattr(PatchReader, "open", refuse)
    counting = CountingStore(Repository.open(report_repo).store)
    read_history(Repository.at(counting))
    assert not [name for name, _, _ in counting.reads if name.startswith("anchors/")]
    with pytest.raises(AssertionError, match="read whole"):
        read_history(Repository.open(report_repo), ulp=True)


def test_since_a_step_or_a_time(report_repo: Path) -> None:
    opened = Repository.open(report_repo)
    assert [s.step for s in read_history(opened, first=4).steps] == [4, 5, 6]
    assert [m.step for m in read_history(opened, first=4).milestones] == [4, 5, 6]
    assert read_history(opened, first=99).steps == ()
    assert len(read_history(opened, since=0).steps) == 7
    for since in ("4", "7d"):
        assert deltackpt("report", report_repo, "--json", "--since", since).status == 0
    assert deltackpt("report", report_repo, "--since", "soon").status == 2


def test_damaged_parts_are_counted_and_hide_no_others(report_repo: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(report_repo, tmp_path / "repo"))
    (part,) = copy.glob("patches/00000002-*/part-00001.safetensors")
    part.write_bytes(b"\0" * part.stat().st_size)
    found = read_history(Repository.open(copy))
    assert found.unread == 1
    assert [table.step for table in found.tables] == [1, 3, 4, 5, 6]


def test_arrivals(tmp_path: Path) -> None:
    events = tmp_path / "follow.jsonl"
    events.write_text(
        '{"event": "switch", "step": 3, "lag": 0.5}\n\n{"event": "exec", "step": 3, "status": 0}\n'
        '{"event": "taken", "engine": "vllm=http://h:1", "step": 3, "lag": 0.75, "pause": 0.1}\n'
        '{"event": "switch", "step": "3", "lag": 1}\n{"event": "switch", "step": 4, "lag": NaN}\n'
    )
    found = read_arrivals([events])
    assert [(a.follower, a.step, a.lag, a.pause) for a in found] == [
        ("follow.jsonl", 3, 0.5, None), ("vllm=http://h:1", 3, 0.75, 0.1)
    ]  # fmt: skip
    events.write_text("step 3  /cache\n")
    with pytest.raises(FormatError, match="json-syntax"):
        read_arrivals([events])
    events.write_bytes(b"{" + b" " * MAX_LINE + b"}")
    with pytest.raises(FormatError, match="json-syntax"):
        read_arrivals([events])
    with pytest.raises(NotFoundError, match="events-missing"):
        read_arrivals([tmp_path / "none"])


def test_spread_and_order() -> None:
    assert spread(list(range(5)), 9) == [0, 1, 2, 3, 4]
    some = spread(list(range(1000)), 7)
    assert (len(some), some[0], some[-1]) == (7, 0, 999)
    assert some == sorted(set(some))
    assert spread(list(range(9)), 1) == [8]
    names = ["lm_head", "model.norm", "model.layers.10", "model.layers.9", "transformer.wte"]
    assert sorted(names, key=model_order)[::-1] == names


def test_sparklines(report_repo: Path) -> None:
    assert spark([0, 1, None, 7], 10) == "▁▂ █"
    assert spark([], 10) == ""
    assert spark([5, 5], 10) == "▁▁"
    assert len(spark(list(range(1000)), 40)) == 40
    assert spark([None] * 30, 5) == "     "
    shown = "\n".join(lines(read_history(Repository.open(report_repo), ulp=True), 100))
    assert all(word in shown for word in ("density", "bits/change", "restore", "model.layers.10", "ULP steps", "gc "))
    assert max(map(len, shown.split("\n"))) <= 100
    done = deltackpt("report", report_repo, "--text")
    assert (done.err, done.status) == ("", 0)
    assert "\u202e" not in done.out


def test_an_empty_repository(tmp_path: Path) -> None:
    Repository.open_or_create(tmp_path / "repo")
    done = deltackpt("report", tmp_path / "repo", "--text")
    assert (done.status, done.err) == (0, "no step on main yet\n")
    assert "no step yet" in done.out
    assert deltackpt("report", tmp_path / "none", "--text").status == 6
