"""`deltackpt apply`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltackpt.errors import UsageError
from deltackpt_cli import format as text
from deltackpt_cli.completion import tensor_names
from deltackpt_cli.console import Output
from deltackpt_cli.options import ObjectCache, ObjectCacheSize, Ref, Repo, Step, Threads, read_through
from deltackpt_cli.signing_options import MaxAge, Trust, policy

if TYPE_CHECKING:
    from deltackpt.restore.materialize import ApplyResult
    from deltackpt.restore.selected import SelectedTensors

Out = Annotated[
    Path,
    typer.Argument(
        metavar="OUT", show_default=False, help="No such path, an empty directory, or, with --cache, a managed cache."
    ),
]
Cache = Annotated[bool, typer.Option("--cache", help="OUT is a managed cache, whose `current` follows the repository.")]
Sync = Annotated[bool, typer.Option("--sync", help="Wait until a power cut can no longer take OUT.")]
Tensors = Annotated[
    list[str] | None,
    typer.Option(
        "--tensor",
        metavar="NAME|GLOB",
        show_default=False,
        autocompletion=tensor_names,
        help="This tensor alone, or those that a glob fits; many. OUT is then one safetensors file.",
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Build a new slot; do not patch the old one.")]


def apply(
    output: Output,
    repo: Repo,
    out: Out,
    step: Step = "latest",
    ref: Ref = "main",
    tensor: Tensors = None,
    cache: Cache = False,
    fresh: Fresh = False,
    sync: Sync = False,
    threads: Threads = None,
    object_cache: ObjectCache = None,
    object_cache_size: ObjectCacheSize = "20GB",
    trust: Trust = None,
    max_age: MaxAge = None,
) -> None:
    """Materialize a step.

    OUT becomes a plain checkpoint directory, or, with --cache, a managed cache that moves to the step. With --tensor it
    becomes a safetensors file of some tensors, for which no other bytes of anchors and patches are read.
    """
    if tensor and (cache or threads is not None):
        raise UsageError(
            "usage", where="--tensor", have="--cache or --threads", need="a file of its own, read in order"
        )
    if fresh and not cache:
        raise UsageError("usage", where="--fresh", have="no --cache", need="--cache, whose slots it is about")
    if sync and cache:
        raise UsageError("usage", where="--sync", have="--cache", need="a directory: a cache is proven after a restart")
    with output.progress() as progress:
        source = read_through(repo, object_cache, object_cache_size, policy(trust, max_age))
        if tensor:
            from deltackpt.restore.selected import apply_tensors

            some = apply_tensors(source, out, tensor, step, ref=ref, sync=sync, progress=progress)
            _note_lease(output, some.leased)
            output.result(some, lambda: _selected(some))
            return
        if cache:
            from deltackpt.cache import apply_to_cache

            done = apply_to_cache(source, out, step, ref=ref, threads=threads, fresh=fresh, progress=progress)
        else:
            from deltackpt.restore import materialize

            done = materialize.apply(source, out, step, ref=ref, sync=sync, threads=threads, progress=progress)
    if done.rebuilt is not None:
        output.note(f"note: the cache was built anew, since {done.rebuilt}")
    _note_lease(output, done.leased)
    output.result(done, lambda: _lines(done))


def _note_lease(output: Output, leased: bool) -> None:
    if not leased:
        output.note("note: the repository is read-only, so no lease keeps gc from what is read")


def _selected(done: SelectedTensors) -> Iterator[str]:
    yield from text.fields(
        [
            ("step", str(done.step)),
            ("path", done.path),
            ("tensors", f"{text.count(len(done.tensors))}, through {done.patches} patch{'es' * (done.patches != 1)}"),
            ("written", f"{text.size(done.written)} in {done.seconds:.3f} s"),
            ("id", done.id),
        ]
    )


def _lines(done: ApplyResult) -> Iterator[str]:
    start = "" if done.anchor is None else f"anchor {done.anchor} and "
    yield from text.fields(
        [
            ("step", str(done.step)),
            ("path", done.path),
            ("read", f"{text.size(done.read)}: {start}{done.patches} patch{'es' * (done.patches != 1)}"),
            ("written", f"{text.size(done.written)} in {done.seconds:.3f} s"),
            ("id", done.id),
        ]
    )
