"""Pages that are no metrics, engines and files of events that never end: told, and left."""

from __future__ import annotations

import pytest
from support.odd_server import ANSWERS, HEAD, answering, page
from support.running import deltackpt

from deltackpt.report.live import LiveReader, LiveView
from deltackpt.repository import Repository


@pytest.mark.parametrize("what", [*ANSWERS, "another page", "byte by byte"])
def test_pages_that_are_no_metrics_are_told(report_repo, what):
    data, pace = ANSWERS.get(what, page(b"<html>It works!</html>")), None
    if what == "byte by byte":
        data, pace = HEAD, 0.05
    with answering(data, then_every=pace) as url:
        found = LiveView(Repository.open(report_repo), metrics=[url]).look()
    assert (found.step, found.readers) == (6, ())
    [error] = found.errors
    assert error.startswith(f"{url}: ")
    assert len(error) > len(url) + 5


def test_numbers_that_are_none_are_not_told(report_repo):
    body = b"deltackpt_step 4\ndeltackpt_lag_seconds NaN\ndeltackpt_wedged 0\n"
    with answering(page(body)) as url:
        found = LiveView(Repository.open(report_repo), metrics=[url]).look()
    assert found.readers == (LiveReader(url, 4, 2, None, ""),)
    assert found.errors == ()


def test_serving_ends_where_an_engine_answers_byte_by_byte(report_repo):
    with answering(HEAD, then_every=0.05) as url:
        done = deltackpt("serve-updates", report_repo, "--engine", f"vllm={url}", "--once", "--timeout", "1s")
    assert done.status == 4, done.err
    assert "timed out after" in done.out


def test_events_without_an_end_are_no_events(report_repo):
    done = deltackpt("report", report_repo, "--text", "--events", "/dev/zero", "--json")
    assert (done.status, done.json["error"]) == (3, "json-syntax")
