"""`deltackpt diff`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltackpt_cli import format as text
from deltackpt_cli.console import Output
from deltackpt_cli.options import Encoding, Threads

if TYPE_CHECKING:
    from deltackpt.report.comparison import CheckpointComparison, Total
    from deltackpt.report.sizes import TensorDifference

Dir = Annotated[Path, typer.Argument(show_default=False, help="A checkpoint directory.")]
ENCODINGS = [e.value for e in Encoding if e is not Encoding.auto]


def diff(output: Output, dir_a: Dir, dir_b: Dir, threads: Threads = None) -> None:
    """Show what a patch would hold.

    From one checkpoint directory to another, by tensor and by layer, with its size in every encoding. Tensors that are
    the same are listed with --verbose.
    """
    from deltackpt.report.comparison import compare

    with output.progress() as progress:
        found = compare(dir_a, dir_b, threads, progress=progress)
    for path, reason in found.left_out:
        output.note(f"note: left out {path}: {reason}")
    output.result(found, lambda: _lines(found, verbose=output.verbose))


def _lines(found: CheckpointComparison, *, verbose: bool) -> Iterator[str]:
    numbers = [">changed", ">density", ">1 ULP", ">auto", *(f">{e}" for e in ENCODINGS)]
    rows = [
        [t.what, t.encoding or "-", t.dtype, *_numbers(t), t.name] for t in found.tensors if verbose or t.what != "same"
    ]
    if rows:
        yield from text.table(["", "encoding", "dtype", *numbers, "tensor"], rows)
        yield ""
    totals = [[text.count(t.tensors), *_numbers(t), t.name] for t in found.layers if verbose or t.tensors]
    totals.append([text.count(found.total.tensors), *_numbers(found.total), "in all"])
    yield from text.table([">tensors", *numbers, "layer"], totals)
    if found.side:
        yield ""
        yield from (f"side file differs: {path}" for path in found.side)


def _numbers(row: TensorDifference | Total) -> Sequence[str]:
    sizes = [text.count(row.sizes[encoding]) for encoding in ENCODINGS]
    return [text.count(row.changed), text.share(row.density), text.share(row.one_ulp), text.count(row.bytes), *sizes]
