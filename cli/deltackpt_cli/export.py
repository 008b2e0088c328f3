"""`deltackpt export`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltackpt_cli import format as text
from deltackpt_cli.console import Output
from deltackpt_cli.options import Ref, Repo, Threads

if TYPE_CHECKING:
    from deltackpt.interop import ExportResult

Format = Annotated[
    str,
    typer.Argument(
        metavar="FORMAT", show_default=False, help="slime (miles, sglang, stitch), slime-v1, trl, prime-rl or vllm."
    ),
]
Out = Annotated[Path, typer.Argument(metavar="OUT", show_default=False, help="The directory to put the steps into.")]
From = Annotated[
    str | None,
    typer.Option("--from", metavar="N|TAG", show_default=False, help="The first step; the oldest if not given."),
]
To = Annotated[str, typer.Option("--to", metavar="N|latest|TAG", help="The last step.")]
Deltas = Annotated[
    bool,
    typer.Option("--deltas-only", help="Leave the first step out: the receivers are at it. Else it is written whole."),
]
Renumber = Annotated[
    bool,
    typer.Option("--renumber", help="Count on from the first step: FORMAT takes no gaps."),
]
Encoding = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        show_default=False,
        help="slime: xor, overwrite, xor_sparse; slime-v1: deltas, indices, deltas_zstd; trl: gap_delta, raw.",
    ),
]
Checksum = Annotated[
    str | None, typer.Option(metavar="NAME", show_default=False, help="slime: xxh3-128, blake3 or adler32.")
]
Marker = Annotated[
    str | None,
    typer.Option(metavar="FILE", show_default=False, help="prime-rl: the marker's name; STABLE by default."),
]


def export(
    output: Output,
    repo: Repo,
    format: Format,
    out: Out,
    start: From = None,
    end: To = "latest",
    ref: Ref = "main",
    deltas_only: Deltas = False,
    renumber: Renumber = False,
    encoding: Encoding = None,
    checksum: Checksum = None,
    marker: Marker = None,
    threads: Threads = None,
) -> None:
    """Write steps in the layout of another system.

    Every state is proven before it is written. A step that the layout cannot carry as a change is written whole, and
    the reason is printed.
    """
    from deltackpt.interop import ExportOptions, export_steps, writer
    from deltackpt.repository import Repository

    given = {"encoding": encoding, "checksum": checksum, "marker": marker}
    name, target = writer(format, out, **{key: value for key, value in given.items() if value is not None})
    options = ExportOptions(start, end, ref, deltas_only, renumber)
    with output.progress() as progress:
        source = Repository.open(repo)
        done = export_steps(source, name, target, out, options, threads=threads, progress=progress)
    output.result(done, lambda: lines(done))


def lines(done: ExportResult) -> Iterator[str]:
    named = [] if done.steps == done.numbers else [("numbered", f"{done.numbers[0]} to {done.numbers[-1]}")]
    yield from text.fields(
        [
            ("format", done.format),
            ("path", done.out),
            ("steps", f"{done.steps[0]} to {done.steps[-1]}" if done.steps else "none"),
            *named,
            *(("whole", f"{number}: {reason}") for number, reason in done.whole),
            ("written", f"{text.size(done.bytes)} in {done.seconds:.3f} s"),
        ]
    )
