"""`deltackpt import`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltackpt_cli import format as text
from deltackpt_cli.console import Output
from deltackpt_cli.options import Ref, Repo, Threads
from deltackpt_cli.signing_options import Sign, Trust

if TYPE_CHECKING:
    from deltackpt.interop import ImportResult

Format = Annotated[
    str,
    typer.Argument(
        metavar="FORMAT",
        show_default=False,
        help="auto, slime (miles, sglang, stitch), slime-v1, trl, prime-rl or prime-rl-sparse.",
    ),
]
Source = Annotated[Path, typer.Argument(metavar="SRC", show_default=False, help="The other system's directory.")]
Base = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", show_default=False, help="The checkpoint that the first step applies to, if that is not whole."
    ),
]
Marker = Annotated[
    str | None,
    typer.Option(metavar="FILE", show_default=False, help="prime-rl: the marker's name, if it is not a known one."),
]
Numbers = Annotated[
    bool,
    typer.Option("--trust-numbers", help="trl: one run, whose missing numbers are steps without changes."),
]
Every = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, show_default=False, help="Also store a step whole if the last anchor is N ago."),
]


def import_(
    output: Output,
    format: Format,
    src: Source,
    repo: Repo,
    base: Base = None,
    marker: Marker = None,
    trust_numbers: Numbers = False,
    anchor_every: Every = None,
    ref: Ref = "main",
    threads: Threads = None,
    sign: Sign = None,
    trust: Trust = None,
) -> None:
    """Publish the steps of another system.

    Each is proven as far as its layout allows, and what it cannot prove is printed. Steps that the branch has from an
    earlier import are passed over. Anything inconsistent is refused; the steps before it are then published.
    """
    from deltackpt.interop import import_steps, reader
    from deltackpt.publish.manifest import AnchorPolicy

    name, source = reader(format, src, **_given(marker=marker, trust_numbers=trust_numbers))
    with output.progress() as progress:
        policy = AnchorPolicy(every=anchor_every)
        done = import_steps(
            name,
            source,
            repo,
            base=base,
            anchor=policy,
            ref=ref,
            threads=threads,
            sign=sign,
            trust=trust,
            progress=progress,
        )
    for note in done.notes:
        output.note(f"note: {note}")
    output.result(done, lambda: _lines(done))


def _given(**options: object) -> dict[str, object]:
    """The options that were set: a format refuses those that it does not have."""
    return {name: value for name, value in options.items() if value}


def _lines(done: ImportResult) -> Iterator[str]:
    steps = f"{done.steps[0]} to {done.steps[-1]}" if done.steps else "none"
    yield from text.fields(
        [
            ("format", done.format),
            ("steps", f"{steps} on {done.ref}" + (f", {done.passed} were there" if done.passed else "")),
            *(("proof", f"{count} x {proof}") for proof, count in done.proofs.items()),
            ("written", f"{text.size(done.bytes)} in {done.seconds:.3f} s"),
        ]
    )
