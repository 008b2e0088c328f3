"""`deltackpt write`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltackpt_cli import format as text
from deltackpt_cli.console import Output
from deltackpt_cli.options import Encoding, Ref, Repo, Shares, Threads, encoding_of, number
from deltackpt_cli.signing_options import Sign, Trust

if TYPE_CHECKING:
    from deltackpt.publish.write import WriteResult

Directory = Annotated[Path, typer.Argument(metavar="CHECKPOINT_DIR", show_default=False, help="What to publish.")]
Number = Annotated[
    int | None, typer.Option(metavar="N", min=0, show_default=False, help="One more than the last step if not given.")
]
Resume = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        show_default=False,
        help="Take the branch back to step N: the new step follows it, and those after it are left behind.",
    ),
]
Base = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", show_default=False, help="The parent step's directory: saves rebuilding the old values."
    ),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        metavar="CACHE", show_default=False, help="A managed cache at the parent step; it moves to the new one."
    ),
]
Choice = Annotated[Encoding, typer.Option(help="How tensors are encoded; `auto` takes the smallest for each.")]
Quantize = Annotated[
    str | None,
    typer.Option(
        metavar="RECIPE",
        show_default=False,
        help="Publish it quantised: fp8-block, fp8-channel, fp8-tensor, int8-channel, int4-group, nvfp4 or mxfp4.",
    ),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(
        "--quantize-ignore",
        metavar="NAME",
        show_default=False,
        help="A module that keeps its weight, or re:PATTERN; in the place of the default, and as often as needed.",
    ),
]
Now = Annotated[bool, typer.Option("--anchor", help="Also store this step whole.")]
Every = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, show_default=False, help="Also store it whole if the last anchor is N steps ago."),
]
Ratio = Annotated[
    float | None,
    typer.Option(
        metavar="R",
        min=0,
        callback=number,
        show_default=False,
        help="Also store it whole if the patches since the last anchor exceed R checkpoints. Default: 1.",
    ),
]
Density = Annotated[
    float | None,
    typer.Option(
        metavar="D",
        min=0,
        callback=number,
        show_default=False,
        help="Also store it whole if more than a share D of the elements changed.",
    ),
]


def write(
    output: Output,
    checkpoint: Directory,
    repo: Repo,
    step: Number = None,
    resume_from: Resume = None,
    base: Base = None,
    cache: Cache = None,
    encoding: Choice = Encoding.auto,
    shares: Shares = None,
    quantize: Quantize = None,
    quantize_ignore: Ignore = None,
    anchor: Now = False,
    anchor_every: Every = None,
    anchor_when_ratio: Ratio = None,
    anchor_when_density: Density = None,
    ref: Ref = "main",
    threads: Threads = None,
    sign: Sign = None,
    trust: Trust = None,
) -> None:
    """Publish a checkpoint directory.

    The first step is stored whole, an anchor; the next ones as patches. The repository is made if there is none. Until
    the step is published whole, readers see the one before.
    """
    from deltackpt.publish import write as library

    ratio = library.ANCHOR_RATIO if anchor_when_ratio is None else anchor_when_ratio
    unquantised: list[tuple[str, str]] = []  # what the quantised copy leaves out
    with output.progress() as progress, ExitStack() as stack:
        if quantize is not None or quantize_ignore:
            checkpoint, base, unquantised = _quantized(stack, quantize, quantize_ignore, checkpoint, base)
        done = library.write(
            checkpoint,
            repo,
            step=step,
            resume_from=resume_from,
            base=base,
            cache=cache,
            encoding=encoding_of(encoding, shares),
            anchor=library.AnchorPolicy(anchor, anchor_every, ratio, anchor_when_density),
            ref=ref,
            threads=threads,
            progress=progress,
            sign=sign,
            trust=trust,
        )
    done = replace(done, left_out=[*unquantised, *done.left_out])
    for path, reason in done.left_out:
        output.note(f"note: left out {path}: {reason}")
    if done.rewound is not None:
        output.note(f"note: {done.ref} was at step {done.rewound}; what came after {done.parent} stays until gc")
    output.result(done, lambda: _lines(done))


def _quantized(
    stack: ExitStack, recipe: str | None, ignore: list[str] | None, checkpoint: Path, base: Path | None
) -> tuple[Path, Path | None, list[tuple[str, str]]]:
    """Quantised copies of the checkpoint and its base, while the stack is open; and what is left out of the first."""
    from deltackpt.errors import UsageError
    from deltackpt.util.extras import install_line

    if recipe is None:
        raise UsageError("quantize-option", where="--quantize-ignore", have="no --quantize", need="a recipe beside it")
    try:
        from deltackpt.quantize.checkpoint import quantized_copy
    except ImportError as error:
        hint = install_line("torch")
        raise UsageError("quantize-missing", where="--quantize", have=str(error), need="torch", hint=hint) from error
    from deltackpt.quantize import Recipe

    chosen = Recipe(recipe, tuple(ignore)) if ignore else Recipe(recipe)
    copied, left_out = stack.enter_context(quantized_copy(checkpoint, chosen))
    return copied, base and stack.enter_context(quantized_copy(base, chosen))[0], [*left_out]


def _lines(done: WriteResult) -> Iterator[str]:
    alone = done.anchor and not done.patch_bytes and bool(done.changed)  # a patch would save nothing
    patched = done.parent is not None and not alone
    stored = [name for name, there in (("anchor", done.anchor), ("patch", patched)) if there]
    changed = f"{text.count(done.changed)} of {text.count(done.elements)} elements ({text.share(done.density)})"
    patch = f"{text.size(done.patch_bytes)}, {text.bits(done.bits_per_change)} bits a change"
    if alone:
        patch = "none: it would be as large as the anchor"
    yield from text.fields(
        [
            ("step", f"{done.step} on {done.ref}" + (f", after {done.parent}" if done.parent is not None else "")),
            ("stored as", " and ".join(stored)),
            *([] if done.parent is None else [("changed", changed), ("patch", patch)]),
            *([("tensors", _some(done.tensors))] if any(done.tensors.values()) else []),
            ("written", f"{text.size(done.bytes)} in {done.seconds:.3f} s"),
            ("id", done.id),
        ]
    )


def _some(tensors: dict[str, int]) -> str:
    return ", ".join(f"{text.count(count)} {what}" for what, count in tensors.items() if count)
