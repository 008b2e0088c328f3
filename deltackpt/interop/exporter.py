"""Export: steps of a repository in the layout of another system."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import ChainError, UsageError
from deltackpt.format.manifest import Link
from deltackpt.interop.protocol import LayoutWriter
from deltackpt.repository import Repository
from deltackpt.repository.leases import lease
from deltackpt.restore.materialize import apply, beside, build
from deltackpt.restore.replay import Replay
from deltackpt.util.file_server import remove_tree, rename
from deltackpt.util.parallel import threads_or_default
from deltackpt.util.places import check_local
from deltackpt.util.progress import SILENT, Progress
from deltackpt.util.scratch import temporary_folder


@dataclass(frozen=True)
class ExportResult:
    """``steps`` by the repository's numbers, ``numbers`` as they are in the layout; ``whole``: number and why.

    ``bytes`` are those of all files below ``out``.
    """

    format: str
    out: str
    steps: list[int]
    numbers: list[int]
    whole: list[tuple[int, str]]
    bytes: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class ExportOptions:
    """Which steps of a repository are exported, and how they are numbered.

    ``start``        the first step; None for the oldest of the branch
    ``end``          the last step: a number, a tag or "latest"
    ``ref``          the branch
    ``deltas_only``  leave the first step out, for receivers that have it; else it is written whole
    ``renumber``     count on from the first step's number, for a layout that takes no gaps
    """

    start: str | int | None = None
    end: str | int = "latest"
    ref: str = "main"
    deltas_only: bool = False
    renumber: bool = False


def export_steps(
    repo: Repository,
    name: str,
    writer: LayoutWriter,
    out: str | os.PathLike[str],
    options: ExportOptions = ExportOptions(),
    *,
    threads: int | None = None,
    progress: Progress = SILENT,
) -> ExportResult:
    """Write steps in the layout ``name`` of ``writer`` below ``out``: the first whole, the others as changes.

    Every state is proven by the step's digests before it is written. Raises ChainError ``foreign-gap``, UsageError
    ``fold-range``, what `apply` raises.
    """
    began = time.monotonic()
    check_local(out, "OUT")
    count, deltas_only = threads_or_default(threads), options.deltas_only or not writer.anchored
    last = repo.find(options.end, options.ref)
    with lease(repo, last):
        links = _between(repo, last, None if options.start is None else repo.find(options.start, options.ref))
        numbers = _numbers(repo, name, writer, links, renumber=options.renumber)
        whole: list[tuple[int, str]] = []
        with temporary_folder("export") as temporary:
            for number, old, new in _walk(repo, links, numbers, temporary, count, progress):
                if old is None:
                    if not deltas_only:
                        writer.whole(number, new)
                        whole.append((number, "it is the first"))
                elif (reason := writer.delta(number, old, new, count)) is not None:
                    whole.append((number, reason))
        written = links[1:] if deltas_only else links
        return ExportResult(
            format=name,
            out=os.fspath(out),
            steps=[link.step for link in written],
            numbers=numbers[len(links) - len(written) :],
            whole=whole,
            bytes=sum(p.stat().st_size for p in Path(out).rglob("*") if p.is_file()),
            seconds=round(time.monotonic() - began, 3),
        )


def _numbers(repo: Repository, name: str, writer: LayoutWriter, links: list[Link], *, renumber: bool) -> list[int]:
    """The numbers of the steps in the layout. Raises ChainError ``foreign-gap`` for gaps that it does not take."""
    first = links[0].step
    counted = list(range(first, first + len(links)))
    numbers = counted if renumber else [link.step for link in links]
    if writer.consecutive and numbers != counted:
        raise ChainError(
            "foreign-gap",
            where=repo.store.url,
            have=f"steps with gaps between {first} and {links[-1].step}",
            need=f"steps without, which {name} asks for",
            hint="With --renumber they are counted on from the first one.",
        )
    return numbers


def _between(repo: Repository, last: Link, first: Link | None) -> list[Link]:
    """The chain from ``first``, or its oldest step, to ``last``."""
    links = [m.link for m in repo.walk(last)][::-1]
    if first is None:
        return links
    if first not in links:
        have = f"steps {first.step} and {last.step}, which is not after it"
        raise UsageError("fold-range", where=repo.store.url, have=have, need="--from a step of the chain of --to")
    return links[links.index(first) :]


def _walk(
    repo: Repository, links: list[Link], numbers: list[int], work: Path, threads: int, progress: Progress
) -> Iterator[tuple[int, Checkpoint | None, Checkpoint]]:
    """Every step as a directory, beside that of the step before."""
    path = work / "0"
    apply(repo, path, f"{links[0].step}-{links[0].id}", threads=threads, progress=progress)
    with Checkpoint.open(path) as new:
        yield numbers[0], None, new
    for i in range(1, len(links)):
        with _moved(repo, links[i - 1], links[i], work / str(i - 1), work / str(i), threads, progress) as (old, new):
            yield numbers[i], old, new


@contextmanager
def _moved(
    repo: Repository, start: Link, end: Link, before: Path, after: Path, threads: int, progress: Progress
) -> Iterator[tuple[Checkpoint, Checkpoint]]:
    """The state of ``end`` at ``after``, from that of ``start`` and the patch between, proven; removes ``before``."""
    plan = repo.resolve(end, have=start)
    target = plan.target
    with Checkpoint.open(before) as old:
        base = old if plan.anchor is None else None
        with beside(after) as folder, Replay.open(repo, plan, base=base) as state:
            build(repo, repo.layout(target), repo.digests(target), state, folder, threads, progress)
            rename(folder, after)
        with Checkpoint.open(after) as new:
            yield old, new
    remove_tree(before)
