"""The sink into a repository: objects durable, then the manifest, then the ref (spec/STORE.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from deltackpt.errors import StoreError
from deltackpt.format.manifest import File, Link, Manifest
from deltackpt.publish.manifest import AnchorPolicy, build_manifest, saves_nothing, since_anchor
from deltackpt.publish.objects import StepObjects
from deltackpt.publish.sink import EncodedPart, StepCommit
from deltackpt.repository import Ref
from deltackpt.repository.commit import PublishLease


@dataclass(frozen=True)
class StepTarget:
    """Where a step is published: the branch ``ref``, which has to be at ``head`` until then (None: it begins).

    The step follows ``before``, whose manifest is ``parent``; None for the first one.
    """

    ref: str
    head: Ref | None
    before: Link | None
    parent: Manifest | None


@dataclass(frozen=True)
class CommittedStep:
    """A step that readers can see. ``bytes`` counts those of its new objects, without the manifest."""

    link: Link
    manifest: Manifest
    bytes: int

    @property
    def patch_bytes(self) -> int:
        """Of its parts."""
        return sum(file.size for file in self.manifest.patch or ())


class RepositorySink:
    """Publishes one step into a repository, under a writer's ``lease`` that covers it (a `Sink`).

    ``policy`` decides whether the step is stored whole as well, or only so where its patch saves nothing; for this the
    commit has to have ``read``. Where it is None, `add` says so. ``since`` is `since_anchor`, if it is known.
    ``verify`` is called when all is durable and nothing is committed, and raises where the step is not to be published
    after all.
    """

    def __init__(
        self,
        objects: StepObjects,
        target: StepTarget,
        lease: PublishLease,
        policy: AnchorPolicy | None,
        *,
        since: Callable[[], tuple[int, int]] | None = None,
        verify: Callable[[], None] = lambda: None,
    ) -> None:
        self.objects, self.target = objects, target
        self.manifest: Manifest | None = None  # once it is built
        self.committing = False  # the commit may have taken effect: nothing is withdrawn from then on
        self._lease, self._policy, self._since, self._verify = lease, policy, since, verify
        self._parts: list[File] | None = None
        self._anchor: tuple[File, ...] | None = None

    def part_bytes(self, most: int) -> int:
        """What `StepObjects.part_bytes` says."""
        return self.objects.part_bytes(most)

    def put(self, part: EncodedPart) -> None:
        """Put a part in the background. Raises what an earlier one raised, or ConflictError ``lease-lapsed``."""
        with self._lease_first():
            self.objects.put(part)

    def add(self, parts: Iterable[File], anchor: tuple[File, ...] | None) -> None:
        """Name the parts, and the anchor, that are durable: those of all ranks, where several publish one step."""
        self._parts, self._anchor = list(parts), anchor

    def commit(self, record: StepCommit) -> CommittedStep:
        """Build the manifest, put it, and swap the ref.

        Raises ConflictError ``lease-lapsed``, ``ref-moved``, ``ref-forked``, FormatError, and what `Store.put` raises.
        """
        with self._lease_first():
            manifest = self._durable(record)
        self._verify()
        self._lease.check()
        self.manifest, self.committing = manifest, True
        link = self.objects.repo.publish(manifest, self.target.ref, self.target.head, self._lease.check)
        self._lease.published(link)
        return CommittedStep(link, manifest, sum(file.size for file in self.objects.stored))

    def abort(self) -> None:
        """Delete what was put, unless the commit may have taken effect."""
        if not self.committing:  # [S-PUB-4]
            self.objects.withdraw()

    def _durable(self, record: StepCommit) -> Manifest:
        """The manifest of the step, once all that it names is in the store."""
        before, parent = self.target.before, self.target.parent
        if self._policy is not None and self._wants_anchor(record, self._policy):
            whole = sum(shard.size for shard in record.files.shards)
            if parent is not None and saves_nothing(self.objects.patch_bytes, whole):
                self.objects.drop_parts()
                record = record.unpatched()
            self._anchor = self._store_whole(record)
        return build_manifest(self.objects, record, before, parent, self._parts, self._anchor)

    @contextmanager
    def _lease_first(self) -> Iterator[None]:
        """Where the store fails and the lease has lapsed, the lease is what is told: a gc may have removed a file while
        it was being put."""
        try:
            yield
        except StoreError:
            self._lease.check()
            raise

    def _wants_anchor(self, record: StepCommit, policy: AnchorPolicy) -> bool:
        before = self.target.before
        if before is None:
            return True
        steps, patches = self._since() if self._since else since_anchor(self.objects.repo, before, policy)
        whole = sum(shard.size for shard in record.files.shards)
        density = record.counts.changed_elements / max(1, record.counts.elements)
        return policy.wants(steps, patches + self.objects.patch_bytes, whole, density)

    def _store_whole(self, record: StepCommit) -> tuple[File, ...]:
        assert record.read is not None, "a step that may be stored whole can be read"
        paths = [shard.path for shard in record.files.shards]
        named = [(self.objects.name("anchors", path), partial(record.read, path)) for path in paths]
        return tuple(self.objects.store_all(named))
