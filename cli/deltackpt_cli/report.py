"""`deltackpt report`."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltackpt.errors import ConflictError, UsageError
from deltackpt_cli import format as text
from deltackpt_cli import units
from deltackpt_cli.console import Output
from deltackpt_cli.options import Ref, Repo

if TYPE_CHECKING:
    from deltackpt.report.history import History

Out = Annotated[
    Path,
    typer.Option("--out", "-o", metavar="FILE", help="The page; an older report there is replaced, nothing else is."),
]
Since = Annotated[
    str | None,
    typer.Option(
        metavar="N|WHEN",
        show_default=False,
        help="From step N on, or up to the first step from before: a time ago (90m, 6h, 7d), or a date (2026-11-28).",
    ),
]
Ulp = Annotated[
    bool, typer.Option("--ulp", help="Also the sign and size of ULP steps; reads the payloads of eight steps.")
]
Text = Annotated[bool, typer.Option("--text", help="Draw in the terminal, and write no page.")]
Events = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        show_default=False,
        help="What `follow --json` or `serve-updates --json` printed, for the time to each follower; many.",
    ),
]


def report(
    output: Output,
    repo: Repo,
    out: Out = Path("deltackpt-report.html"),
    since: Since = None,
    ulp: Ulp = False,
    text_: Text = False,
    events: Events = None,
    ref: Ref = "main",
) -> None:
    """Show how a branch went, on one page.

    Density over steps and by layer, bits a change, bytes, encodings, anchors, folds and tags, what a restore reads, who
    is behind, and what gc would free; each figure with its table. The page needs no network. No payload is read without
    --ulp. With --json the numbers are printed, and no page is written.
    """
    step = since is not None and since.isascii() and since.isdigit()
    after = None if since is None or step else units.moment(since, "--since", time.time())
    page_wanted = not (text_ or output.json)
    if page_wanted:
        from deltackpt.report.figures import require_matplotlib

        require_matplotlib()
        _check(out)
    from deltackpt.report.arrivals import read_arrivals
    from deltackpt.report.history import read_history
    from deltackpt.repository import Repository

    arrivals = read_arrivals(events or ())
    with output.progress() as progress:
        found = read_history(
            Repository.open(repo), ref, first=int(since) if since and step else 0, since=after, ulp=ulp,
            arrivals=arrivals, progress=progress,
        )  # fmt: skip
    if not found.steps:
        output.note(f"no step on {ref} yet" if since is None else f"no step on {ref} since then")
    if not page_wanted:
        from deltackpt_cli.sparklines import lines

        output.result(found, lambda: lines(found))
        return
    _write(out, found)
    output.note(f"{out}: {text.count(len(found.steps))} steps")


def _check(out: Path) -> None:
    """Raise ConflictError ``output-exists`` for anything but an earlier report, UsageError for what is no file."""
    from deltackpt.report.page import BEGIN
    from deltackpt.util.places import check_local

    check_local(out, "--out")
    if out.is_dir():
        raise UsageError("usage", where="--out", have=f"{out}, a directory", need="the file that becomes the page")
    with suppress(FileNotFoundError):
        with out.open("rb") as file:
            ours = file.read(len(BEGIN)) == BEGIN.encode()
        if not ours:
            need = "no such file, or an earlier report"
            raise ConflictError("output-exists", where=out, have="a file of another kind", need=need)


def _write(out: Path, history: History) -> None:
    from deltackpt.report.page import page
    from deltackpt.util.disk import space_errors
    from deltackpt.util.file_server import rename

    draft = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    made = page(history).encode("utf-8", "backslashreplace")
    try:
        with space_errors(out):
            draft.write_bytes(made)
            _check(out)
            rename(draft, out)
    finally:
        draft.unlink(missing_ok=True)
