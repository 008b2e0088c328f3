"""A step of changes, published: it costs its changes, and a hash of the tensors that it changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deltackpt.checkpoint.diff import State
from deltackpt.codecs import SCAN_LIMIT
from deltackpt.errors import ConflictError
from deltackpt.format.digests import proves
from deltackpt.format.manifest import Link
from deltackpt.interop.protocol import Touched
from deltackpt.interop.working import Working
from deltackpt.publish.manifest import AnchorPolicy, record
from deltackpt.publish.step import Draft, base_differs, put_parts
from deltackpt.repository import Repository
from deltackpt.repository.writer_lease import publishing
from deltackpt.util.parallel import ordered_map
from deltackpt.util.progress import Progress


def check_working(repo: Repository, link: Link, working: Working, threads: int) -> None:
    """Raises ChainError ``base-differs`` unless every tensor is that of the step ``link``."""
    digests = repo.digests(repo.load(link))

    def one(name: str) -> tuple[str, bool]:
        same = proves(working.bytes_of(name), working.tensors[name].dtype, digests[name])
        working.release(name)
        return name, same

    if wrong := [name for name, same in ordered_map(one, working.tensors, threads) if not same]:
        raise base_differs(working.checkpoint.root, wrong)


def publish_changes(
    repo: Repository,
    ref: str,
    before: Link,
    step: int,
    working: Working,
    touched: Mapping[str, Touched],
    prove: Callable[[State], None],
    *,
    anchor: AnchorPolicy,
    threads: int,
    metadata: dict[str, Any],
    progress: Progress,
) -> tuple[Link, Draft]:
    """Move ``working`` from ``before`` to the next step, and publish that if ``prove`` takes it.

    Raises ConflictError ``ref-moved``, ``lease-lapsed``, and what the changes raise; then nothing is published.
    """
    head = repo.ref(ref)
    if head is None or head.link != before:
        have = f"step {head.link.step}, {head.link.id[:12]}" if head else "no step"
        need = f"step {before.step}, {before.id[:12]}"
        raise ConflictError("ref-moved", where=f"{repo.store.url}, ref {ref}", have=have, need=need)
    with publishing(repo, before) as held:
        draft, parent = Draft(repo, step), repo.load(before)
        try:
            progress.start("import", sum(shard.size for shard in working.checkpoint.shards))
            compare = working.comparison(touched, repo.digests(parent))
            put_parts(draft, parent, working, working, "auto", threads, SCAN_LIMIT, None, progress, compare)
            prove(working)
            manifest = record(draft, working.checkpoint, before, parent, anchor, metadata, progress)
            held.check()
        except BaseException:
            draft.withdraw()
            raise
        link = repo.publish(manifest, ref, head, held.check)
        held.published(link)
        return link, draft
