"""`deltackpt watch`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated

import typer

from deltackpt_cli import format as text
from deltackpt_cli import units
from deltackpt_cli.console import Output
from deltackpt_cli.options import Encoding, Ref, Repo, Shares, Threads, encoding_of
from deltackpt_cli.serving_metrics import MetricsPort, served
from deltackpt_cli.signals import stopped_by_signals
from deltackpt_cli.signing_options import Sign, Trust
from deltackpt_cli.waiting import Grace, Wait, grace_of

if TYPE_CHECKING:
    from deltackpt.watch import Published

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", show_default=False, help="Where the trainer saves its checkpoint directories.")
]
Pattern = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="What they are called; {step} stands for the number. Folders may be in it: iter_{step}/hf."
    ),
]
Marker = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", show_default=False, help="A file that the trainer writes last into each, such as STABLE."
    ),
]
Settle = Annotated[
    str, typer.Option(metavar="TIME", help="For how long nothing may change where no marker says that all is written.")
]
Poll = Annotated[str, typer.Option(metavar="TIME", help="How often to look: 0.5s, 1s, 1m.")]
Prune = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        min=1,
        show_default=False,
        help="Keep the newest K published directories; of older ones remove what the repository was proven to hold.",
    ),
]
PruneAll = Annotated[
    bool,
    typer.Option(
        "--prune-all", help="With --prune-dense: remove them whole, optimizer states and all else that is in them too."
    ),
]
Rewind = Annotated[
    bool, typer.Option("--rewind", help="Follow a trainer that went back and saves published steps anew.")
]
Abandon = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        show_default=False,
        help="Pass over a directory that stays unfinished, and the same, for TIME. It holds up later ones otherwise.",
    ),
]
Once = Annotated[bool, typer.Option("--once", help="Publish what is finished, and end.")]
Every = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, show_default=False, help="Also store a step whole if the last anchor is N ago."),
]
Choice = Annotated[Encoding, typer.Option(help="How tensors are encoded; `auto` takes the smallest for each.")]


def watch(
    output: Output,
    directory: Directory,
    repo: Repo,
    pattern: Pattern = "step_{step}",
    done_marker: Marker = None,
    settle: Settle = "5s",
    poll: Poll = "1s",
    prune_dense: Prune = None,
    prune_all: PruneAll = False,
    rewind: Rewind = False,
    abandon: Abandon = None,
    once: Once = False,
    wait: Wait = False,
    grace: Grace = "60s",
    metrics_port: MetricsPort = None,
    anchor_every: Every = None,
    encoding: Choice = Encoding.auto,
    shares: Shares = None,
    ref: Ref = "main",
    threads: Threads = None,
    sign: Sign = None,
    trust: Trust = None,
) -> None:
    """Publish every checkpoint that a trainer saves.

    In order, each once, whatever restarts; none that is still being written: its marker is there, or it did not change
    for a while, is complete by its index, and hashes to the same twice. One line a step; --json makes it an object.

    Until SIGINT, SIGTERM or SIGHUP. A DIR, repository or branch that was there and is gone is reported at once, and
    once a minute; nothing is made anew in its place. With --wait a DIR that is not there yet is waited for too.
    """
    from deltackpt.publish.manifest import AnchorPolicy
    from deltackpt.watch import Watch, WatchOptions

    options = WatchOptions(
        pattern=pattern,
        marker=done_marker,
        settle=units.duration(settle, "--settle"),
        rewind=rewind,
        prune_dense=prune_dense,
        prune_all=prune_all,
        abandon=None if abandon is None else units.duration(abandon, "--abandon"),
        anchor=AnchorPolicy(every=anchor_every),
        encoding=encoding_of(encoding, shares),
        ref=ref,
        threads=threads,
        sign=sign,
        trust=trust,
        grace=grace_of(wait, grace),
    )
    every = units.duration(poll, "--poll")
    stopped = nullcontext(Event()) if once else stopped_by_signals()  # what was to end by itself is interrupted
    with stopped as stop, served(output, "watch", metrics_port) as metrics:
        following = Watch(directory, repo, options, notify=lambda line: output.note(f"note: {line}"), metrics=metrics)
        for done in following.run(poll=every, once=once, stop=stop):
            output.result(done, lambda done=done: _lines(done))  # type: ignore[misc]


def _lines(done: Published) -> Iterator[str]:
    what = "anchor" if done.anchor else f"{text.count(done.changed)} changes, {text.size(done.patch_bytes)}"
    back = "" if done.rewound is None else f", back from step {done.rewound}"
    pruned = f"; removed {', '.join(done.pruned)}" if done.pruned else ""
    yield f"step {done.step}: {what} in {done.seconds:.3f} s, from {done.directory}{back}{pruned}"
