"""`deltackpt inspect`."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltackpt_cli import format as text
from deltackpt_cli.console import Output
from deltackpt_cli.options import Ref, Step, Threads

if TYPE_CHECKING:
    from deltackpt.report.entries import TensorEntry
    from deltackpt.report.inspection import Inspection

Target = Annotated[
    str,
    typer.Argument(
        metavar="REPO|PART", show_default=False, help="A repository, or one part of a patch: a file, or its URL."
    ),
]


class By(Enum):
    """The orders of `deltackpt.report.inspection.ORDERS`, which would cost an import of numpy; a test holds them
    equal."""

    name = "name"
    changes = "changes"
    density = "density"
    bytes = "bytes"
    elements = "elements"


Sort = Annotated[By, typer.Option("--sort", help="The order of the tensors: by name, or the largest first.")]
Top = Annotated[
    int | None,
    typer.Option("--top", metavar="N", min=1, show_default=False, help="The first N tensors; the total is of all."),
]


def inspect(
    output: Output,
    target: Target,
    step: Step = "latest",
    ref: Ref = "main",
    sort: Sort = By.name,
    top: Top = None,
    threads: Threads = None,
) -> None:
    """Show what a patch holds, tensor by tensor.

    Of a store that is not local only headers and tables are read, and the share of steps by one ULP is not known.
    """
    from deltackpt.report.inspection import inspect_part, inspect_step, ordered
    from deltackpt.repository import Repository

    with output.progress() as progress:
        if ("://" in target and target.endswith(".safetensors")) or Path(target).is_file():
            found = inspect_part(target)
        else:
            found = inspect_step(Repository.open(target), step, ref, threads=threads, progress=progress)
    shown = ordered(found, sort.value, top)
    if len(shown.tensors) < len(found.tensors):
        output.note(f"{text.count(len(shown.tensors))} of {text.count(len(found.tensors))} tensors")
    output.result(shown, lambda: _lines(shown))


def _lines(found: Inspection) -> Iterator[str]:
    headers = ["encoding", "dtype", "shape", ">elements", ">changed", ">density", ">bytes", ">bits/change", ">1 ULP"]
    total = f"step {found.step}, {found.kind} of {text.count(found.files)} file{'s' * (found.files != 1)}"
    numbers = (found.elements, found.changed, found.density, found.bytes, found.bits_per_change, found.one_ulp)
    rows = [[t.encoding, t.dtype or "-", _shape(t), *_numbers(t), t.name] for t in found.tensors]
    yield from text.table([*headers, "tensor"], [*rows, ["", "", "", *_row(*numbers), total]])


def _shape(t: TensorEntry) -> str:
    return text.shape(t.shape) + (f" at {text.shape(t.offset)}" if t.offset is not None else "")


def _numbers(t: TensorEntry) -> list[str]:
    return _row(t.elements, t.changed, t.density, t.bytes, t.bits_per_change, t.one_ulp)


def _row(
    elements: int, changed: int | None, density: float | None, size: int, bits: float | None, one_ulp: float | None
) -> list[str]:
    counts = [text.count(elements), text.count(changed), text.share(density), text.count(size)]
    return [*counts, text.bits(bits), text.share(one_ulp)]
