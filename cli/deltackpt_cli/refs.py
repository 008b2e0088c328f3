"""`deltackpt refs`."""

from __future__ import annotations

from deltackpt.util.moments import utc
from deltackpt_cli import format as text
from deltackpt_cli.console import Output
from deltackpt_cli.options import Repo


def refs(output: Output, repo: Repo) -> None:
    """List branches and tags, and the steps that they are at."""
    from deltackpt.report import refs as report
    from deltackpt.repository import Repository

    found = report.refs(Repository.open(repo))
    rows = [
        [
            ref.kind,
            "-" if ref.step is None else str(ref.step),
            ref.name,
            "-" if ref.time is None else utc(ref.time),
            "-" if ref.id is None else ref.id if output.verbose else ref.id[:12],
            *([ref.error or ""] if any(r.error for r in found.refs) else []),
        ]
        for ref in found.refs
    ]
    headers = ["kind", ">step", "name", "published", "id", *["wrong"] * any(r.error for r in found.refs)]
    if not rows:
        output.note("no branch and no tag yet")
    output.result(found, lambda: text.table(headers, rows) if rows else [])
