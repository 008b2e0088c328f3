"""Export: steps of a repository in the layout of another system."""

from __future__ import annotations

import os
import shutil
import tempfile
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
from deltackpt.repository import Repository, chain
from deltackpt.repository.leases import lease
from deltackpt.restore.materialize import apply, beside, build
from deltackpt.restore.replay import Replay
from deltackpt.util.parallel import threads_or_default
from deltackpt.util.progress import SILENT, Progress


@dataclass(frozen=True)
class ExportResult:
    """``steps`` by the repository's numbers, ``numbers`` as they are in the layout; ``whole``: number and why."""

    format: str
    out: str
    steps: list[int]
    numbers: list[int]
    whole: list[tuple[int, str]]
    bytes: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def export_steps(
    repo: Repository,
    name: str,
    writer: LayoutWriter,
    out: str | os.PathLike[str],
    *,
    start: str | int | None = None,
    end: str | int = "latest",
    ref: str = "main",
    deltas_only: bool = False,
    renumber: bool = False,
    threads: int | None = None,
    progress: Progress = SILENT,
) -> ExportResult:
    """Write the steps from ``start`` (the oldest of the branch if None) to ``end``: the first whole, the others after.

    ``deltas_only`` leaves the first one out, for receivers that are at it. ``renumber`` counts on from the first one's
    number where the steps have gaps and the layout must not. Every state is proven by the step's digests before it is
    written. Raises ChainError ``foreign-gap``, UsageError ``fold-range``, what `apply` raises.
    """
    began = time.monotonic()
    count, deltas_only = threads_or_default(threads), deltas_only or not writer.anchored
    last = repo.find(end, ref)
    with lease(repo, last):
        links = _between(repo, last, None if start is None else repo.find(start, ref))
        first = links[0].step
        numbers = [first + i if renumber else link.step for i, link in enumerate(links)]
        if writer.consecutive and numbers != list(range(first, first + len(links))):
            raise ChainError(
                "foreign-gap",
                where=repo.store.url,
                have=f"steps with gaps between {first} and {last.step}",
                need=f"steps without, which {name} asks for",
                hint="With --renumber they are counted on from the first one.",
            )
        whole: list[tuple[int, str]] = []
        with tempfile.TemporaryDirectory(prefix="deltackpt-export-") as temporary:
            for number, old, new in _walk(repo, links, numbers, Path(temporary), count, progress):
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


def _between(repo: Repository, last: Link, first: Link | None) -> list[Link]:
    """The chain from ``first``, or its oldest step, to ``last``."""
    links = [m.link for m in chain.walk(last, repo.load, repo.edges())][::-1]
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
    """The state of ``end`` at ``after``, from that of ``start`` and the patch between, proven; ``before`` then goes."""
    plan = repo.resolve(end, have=start)
    target = plan.target
    with Checkpoint.open(before) as old:
        base = old if plan.anchor is None else None
        with beside(after) as folder, Replay.open(repo, plan, base=base) as state:
            build(repo, repo.layout(target), repo.digests(target), state, folder, threads, progress)
            os.rename(folder, after)
        with Checkpoint.open(after) as new:
            yield old, new
    shutil.rmtree(before)
