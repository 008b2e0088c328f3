"""`deltackpt log`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from deltackpt_cli import text
from deltackpt_cli.console import Voice
from deltackpt_cli.options import Ref, Repo

if TYPE_CHECKING:
    from deltackpt.report.log import Log


def log(voice: Voice, repo: Repo, ref: Ref = "main") -> None:
    """List the steps, newest first."""
    from deltackpt.report import log as report
    from deltackpt.repository import Repository

    found = report.log(Repository.open(repo), ref)
    if not found.steps:
        voice.note(f"no step on {ref} yet")
    voice.result(found, lambda: _lines(found, verbose=voice.verbose))


def _lines(found: Log, *, verbose: bool) -> Iterator[str]:
    if not found.steps:
        return
    headers = [">step", "stored as", ">bytes", ">changed", ">density", ">bits/change", "time", "id"]
    rows = [
        [
            str(s.step),
            " and ".join(k for k, size in (("anchor", s.anchor_bytes), ("patch", s.patch_bytes)) if size is not None),
            text.count((s.anchor_bytes or 0) + (s.patch_bytes or 0)),
            text.count(s.changed),
            text.share(s.density),
            text.bits(s.bits_per_change),
            text.moment(s.time),
            s.id if verbose else s.id[:12],
        ]
        for s in found.steps
    ]
    yield from text.table(headers, rows)
