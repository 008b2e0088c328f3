"""`deltackpt convert`."""

from __future__ import annotations

from typing import Annotated

import typer

from deltackpt_cli.console import Output
from deltackpt_cli.export import Checksum, Encoding, Out, lines
from deltackpt_cli.import_ import Base, Format, Numbers, Source
from deltackpt_cli.options import Threads

Target = Annotated[
    str,
    typer.Argument(
        metavar="TO", show_default=False, help="slime (miles, sglang, stitch), slime-v1, trl, prime-rl or vllm."
    ),
]


def convert(
    output: Output,
    format: Format,
    src: Source,
    to: Target,
    out: Out,
    base: Base = None,
    trust_numbers: Numbers = False,
    encoding: Encoding = None,
    checksum: Checksum = None,
    threads: Threads = None,
) -> None:
    """Turn the steps of one system into those of another.

    An import into a repository that is gone afterwards, and an export of all of it.
    """
    from deltackpt.interop import convert_steps, reader, writer

    name, source = reader(format, src, **({"trust_numbers": True} if trust_numbers else {}))
    options = {"encoding": encoding, "checksum": checksum}
    target_name, target = writer(to, out, **{key: value for key, value in options.items() if value is not None})
    with output.progress() as progress:
        read, written = convert_steps(
            name, source, target_name, target, out, base=base, threads=threads, progress=progress
        )
    for proof, count in read.proofs.items():
        output.note(f"note: {count} x {proof}")
    output.result(written, lambda: lines(written))
