"""`deltackpt doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from deltackpt_cli import format as text
from deltackpt_cli.console import Output

if TYPE_CHECKING:
    from deltackpt.store.doctor import Diagnosis

BROKEN = 8  # as a store that does not answer
NOTHING = {"guaranteed": "nothing", "not guaranteed": "nothing: this store does all that deltackpt asks of one"}

Url = Annotated[
    str, typer.Argument(metavar="URL", show_default=False, help="The store: a local directory or a URL, as for REPO.")
]


def doctor(output: Output, url: Url) -> None:
    """Test a store: what it guarantees, and what not. Says too whether this host has the compiled kernels.

    Writes a few small objects into a folder of its own, and removes them. The exit code is 8 if the store does
    not do what it should.
    """
    from deltackpt.store import open_store
    from deltackpt.store.doctor import diagnose

    found = diagnose(open_store(url))
    output.result(found, lambda: _lines(found))
    if not found.ok:
        raise typer.Exit(BROKEN)


def _lines(found: Diagnosis) -> Iterator[str]:
    rows = [[_verdict(c.claimed, c.holds), c.name, f"{c.seconds:.2f} s", c.note] for c in found.checks]
    yield from text.table(["", "check", ">time", "seen"], rows)
    for title, words in (("guaranteed", found.guaranteed), ("not guaranteed", found.not_guaranteed)):
        yield ""
        yield f"{title}:"
        yield from (f"  {word}" for word in words or [NOTHING[title]])
    yield from ("", f"kernels: {found.kernels}")


def _verdict(claimed: bool, holds: bool) -> str:
    if claimed:
        return "ok" if holds else "BROKEN"
    return "no"
