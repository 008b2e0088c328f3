"""A step of changes, published: it costs its changes, and a hash of the tensors that it changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deltackpt.checkpoint.diff import State
from deltackpt.errors import ConflictError
from deltackpt.format.digests import proves
from deltackpt.format.manifest import Link
from deltackpt.interop.protocol import Touched
from deltackpt.interop.working import Working
from deltackpt.patch.part import Origin
from deltackpt.publish.encode_batch import Comparing
from deltackpt.publish.manifest import AnchorPolicy
from deltackpt.publish.objects import StepObjects
from deltackpt.publish.repository_sink import CommittedStep, RepositorySink, StepTarget
from deltackpt.publish.sink import StepCommit, elements_of, publish_step
from deltackpt.publish.step import EncodeOptions, base_differs, encode_step
from deltackpt.publish.write import ShardReader
from deltackpt.repository import Ref, Repository
from deltackpt.repository.writer_lease import publishing
from deltackpt.util.parallel import ordered_map
from deltackpt.util.progress import SILENT, Progress


def check_working(repo: Repository, link: Link, working: Working, threads: int) -> None:
    """Raises ChainError ``base-differs`` unless every tensor is that of the step ``link``."""
    digests = repo.digests(repo.load(link))

    def one(name: str) -> tuple[str, bool]:
        same = proves(working.bytes_of(name), working.tensors[name].dtype, digests[name])
        working.release(name)
        return name, same

    if wrong := [name for name, same in ordered_map(one, working.tensors, threads) if not same]:
        raise base_differs(working.checkpoint.root, wrong)


def head_at(repo: Repository, ref: str, before: Link) -> Ref:
    """The branch, which has to be at ``before``. Raises ConflictError ``ref-moved`` where it is not."""
    head = repo.ref(ref)
    if head is None or head.link != before:
        have = f"step {head.link.step}, {head.link.id[:12]}" if head else "no step"
        need = f"step {before.step}, {before.id[:12]}"
        raise ConflictError("ref-moved", where=f"{repo.store.url}, ref {ref}", have=have, need=need)
    return head


def publish_changes(
    repo: Repository,
    head: Ref,
    step: int,
    working: Working,
    touched: Mapping[str, Touched],
    prove: Callable[[State], None],
    *,
    anchor: AnchorPolicy,
    metadata: Mapping[str, Any],
    threads: int = 1,
    progress: Progress = SILENT,
) -> CommittedStep:
    """Apply ``touched`` to ``working``, the state that ``head`` is at, and publish it as the next step of that branch
    unless ``prove`` raises.

    Raises ConflictError ``ref-moved``, ``lease-lapsed``, and what the changes raise; then nothing is published.
    """
    before = head.link
    with publishing(repo, before) as lease:
        parent = repo.load(before)
        target = StepTarget(head.name, head, before, parent)
        sink = RepositorySink(StepObjects(repo, step, threads=threads), target, lease, anchor)

        def encode() -> StepCommit:
            new, before_digests = working.checkpoint, repo.digests(parent)
            progress.start("import", sum(shard.size for shard in new.shards))
            compare = working.comparison(touched, before_digests)
            states = Comparing(working, working, before_digests, repo.store.url, compare)
            origin = Origin(repo.id, step, before.id, parent.state)
            builder = encode_step(sink, origin, states, EncodeOptions(threads=threads), progress)
            prove(working)
            files = ShardReader(new, progress)
            return StepCommit(new, builder.digests, builder.counts(elements_of(new)), metadata, read=files.chunks)

        return publish_step(sink, encode)
