"""One step, from changes in memory to a manifest that the ref names: every rank its share, rank 0 the record."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from deltackpt.errors import ConflictError
from deltackpt.format import state_digest
from deltackpt.format.digests import UNSTATED
from deltackpt.format.manifest import Link, Manifest
from deltackpt.format.state_digest import Sums, TensorDigest
from deltackpt.hooks.anchors import AnchorWriter, Read
from deltackpt.hooks.group_sink import Attempt, GroupSink
from deltackpt.hooks.metrics import StepMetrics
from deltackpt.hooks.parts import Share, Traffic, encode_deltas
from deltackpt.hooks.pending import CapturedStep
from deltackpt.hooks.plan import FilePlan, Global
from deltackpt.hooks.process_group import ProcessGroup, share
from deltackpt.patch.part import Origin
from deltackpt.publish.manifest import AnchorPolicy, saves_nothing, since_anchor
from deltackpt.publish.objects import StepObjects, remove
from deltackpt.publish.repository_sink import RepositorySink, StepTarget
from deltackpt.publish.sink import StepCommit, elements_of, publish_step
from deltackpt.publish.step import EncodeOptions, StepBuilder
from deltackpt.publish.uploads import AT_ONCE
from deltackpt.repository import Ref, Repository
from deltackpt.repository.objects import new_folder
from deltackpt.repository.writer_lease import WriterLease
from deltackpt.torch_views.delta import since


@dataclass(frozen=True)
class Base:
    """The step that the next one follows. Only rank 0 has its manifest and digests."""

    link: Link
    manifest: Manifest
    digests: Mapping[str, TensorDigest]


@dataclass(frozen=True)
class StepPlan:
    """What rank 0 decides before a step: the folders of its objects, and what its parts apply to (None: no part).

    ``adopted`` is an earlier attempt that seemed to fail, and took effect. With ``whole`` the step is stored as an
    anchor too.
    """

    step: int
    origin: Origin | None
    folders: Mapping[str, str]
    adopted: Link | None
    whole: bool


@dataclass(frozen=True)
class TrainerState:
    """What a trainer publishes: every tensor, and the files that a checkpoint of them has.

    ``read`` gives the words of the box of a tensor that this rank owns, for an anchor, ``sums`` every owned box's share
    of the state digest. ``instead`` gives, for a step and the one before it, how the words of an anchor are read that
    is due and not part of the step as planned; None where none is.
    """

    tensors: Mapping[str, Global]
    files: FilePlan
    read: Read
    sums: Callable[[], dict[str, Sums]]
    instead: Callable[[CapturedStep, Link], Read | None] = lambda captured, before: None


@dataclass(frozen=True)
class PublishOptions:
    """When a step is stored whole, how changes are encoded, and what every manifest says besides."""

    policy: AnchorPolicy
    encode: EncodeOptions
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Extra:
    """What a step's record says besides, known only when it is published: ``metadata``, and ``side`` files by path."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    side: Mapping[str, bytes] = field(default_factory=dict)


class Cancelled(Exception):
    """The hook is being closed without publishing the rest."""


class Publisher:
    """Publishes one step at a time; every rank of a group calls `publish` for the same steps in the same order.

    ``seek`` is the ref that has to be swapped: that of ``base``, or of a later step on a rewind.
    """

    def __init__(
        self, repo: Repository, ref: str, group: ProcessGroup, state: TrainerState, options: PublishOptions
    ) -> None:
        self.repo, self.ref, self.group = repo, ref, group
        self.base: Base | None = None
        self.fresh = False  # the next step has another state than `base` led to: only an anchor can follow
        self.seek: Ref | None = None
        self.before: Callable[[CapturedStep], Extra] = lambda captured: Extra()  # rank 0's, before a step is published
        self.due = False  # the policy wants an anchor at the next step
        self.anchored = False  # the last step is stored whole; said at rank 0
        self.cancelled = False
        self.lease = WriterLease(repo)  # rank 0's, from its first step until it is closed
        self.shares: list[Share] = []  # of the last step, at rank 0
        self.traffic: list[Traffic] = []  # of each rank for the last anchor
        self.state, self._options = state, options
        self.encode = options.encode
        self._attempts: dict[str, Base] = {}  # by manifest id: what may be published though an error was raised
        self._tried: dict[int, CapturedStep] = {}
        self._seconds: dict[str, float] = {}
        self._extra = Extra()

    def publish(self, captured: CapturedStep) -> StepMetrics:
        """Raises what the store raises, ConflictError ``ref-moved``, ``lease-lapsed``, StoreError ``rank-failed`` and
        ``rank-lost``; the step is then not published, or, if the store was unclear about it, found out about the next
        time."""
        self._seconds = {"diff": captured.seconds, "wait": captured.waited}
        with ExitStack() as stack:
            plan = share(self.group, lambda: self._begin(captured, stack))
            if plan.adopted is not None:
                captured = self._adopt(captured, plan.adopted)
                if captured.step == plan.adopted.step:
                    return self._metrics(captured, 0)
            at_once = min(self._options.encode.threads, AT_ONCE)
            objects = StepObjects(self.repo, plan.step, folders=plan.folders, at_once=at_once, check=self._check)
            sink = RepositorySink(objects, self._target(), self.lease, policy=None, verify=self._check)
            group = GroupSink(self.group, sink, lambda shares: self._lead(sink, captured, plan, shares))
            self._tried[captured.step] = captured
            shares, self.due = publish_step(group, lambda: self._attempt(group, objects, captured, plan))
        self.shares, self.fresh = shares, False
        self.anchored = any(s.anchor for s in shares)
        if self.anchored:
            self.traffic = [s.traffic for s in shares]
        self._attempts.clear()
        self._tried.clear()
        return self._metrics(captured, sum(f.size for s in shares for f in s.parts))

    # Rank 0

    def _begin(self, captured: CapturedStep, stack: ExitStack) -> StepPlan:
        self._check()
        self._extra = self.before(captured)
        head = self.repo.ref(self.ref)
        adopted = None
        if head is not None and head.link.id in self._attempts:
            self.base, self.seek, adopted = self._attempts[head.link.id], head, head.link
        if (head.link if head else None) != (self.seek.link if self.seek else None):
            have = f"step {head.link.step}, {head.link.id[:12]}" if head else "no step"
            need = f"step {self.seek.link.step}, {self.seek.link.id[:12]}" if self.seek else "no step"
            hint = "Another writer published on this ref. Give each trainer a ref of its own."
            raise ConflictError(
                "ref-moved", where=f"{self.repo.store.url}, ref {self.ref}", have=have, need=need, hint=hint
            )
        base = self.base
        stack.enter_context(self.lease.step(base.link if base else None))
        origin = Origin(self.repo.id, captured.step, base.link.id, base.manifest.state) if base else None
        kinds = ("patches", "anchors", "states")
        whole = captured.whole or base is None or self.fresh
        folders = {kind: new_folder(kind, captured.step) for kind in kinds}
        return StepPlan(captured.step, origin, folders, adopted, whole)

    def _target(self) -> StepTarget:
        """At the other ranks, which commit nothing, without a base."""
        base = self.base
        return StepTarget(self.ref, self.seek, base.link if base else None, base.manifest if base else None)

    def _lead(self, sink: RepositorySink, captured: CapturedStep, plan: StepPlan, shares: list[Share]) -> bool:
        """Combine the shares and commit the step. -> whether the next one is to be an anchor."""
        began = time.monotonic()
        anchors = {path: file for s in shares for path, file in s.anchor.items()}
        anchor = tuple(anchors[shard.path] for shard in self.state.files.shards) if plan.whole or anchors else None
        parts = [file for s in shares for file in s.parts]
        dense = (
            anchor is not None and self._patched and saves_nothing(sum(f.size for f in parts), self.state.files.size)
        )
        sink.add([] if dense else parts, anchor)
        builder, odd = self._combine(shares), sum(s.nonfinite for s in shares)
        commit = StepCommit(
            self.state.files.with_side(self._extra.side),
            builder.digests,
            builder.counts(elements_of(self.state.files)),
            {
                **({"nonfinite": odd} if odd else {}),
                **self._options.metadata,
                **captured.metadata,
                **self._extra.metadata,
            },
            patched=self._patched,
        )
        if dense:
            commit = commit.unpatched()
        try:
            link = sink.commit(commit).link
        finally:
            if sink.manifest is not None and sink.committing:
                done = Base(sink.manifest.link, sink.manifest, builder.digests)
                self._attempts[done.link.id] = done
        self.base, self.seek = done, Ref.to(self.ref, link)
        if dense:
            remove(self.repo, parts)
        self._seconds["commit"] = time.monotonic() - began
        return self._anchor_is_due(link)

    @property
    def _patched(self) -> bool:
        """Does a patch lead to the next step?"""
        return self.base is not None and not self.fresh

    def _combine(self, shares: list[Share]) -> StepBuilder:
        """What all ranks did as one: sums of the same tensor add up."""
        xxh3 = {name: value for s in shares for name, value in s.xxh3.items()}
        sums: dict[str, Sums] = {}
        for s in shares:
            for name, value in s.sums.items():
                sums[name] = state_digest.add(sums.get(name, state_digest.ZERO), value)
        base = self.base
        if base is None or not self._patched:
            names = self.state.tensors
            return StepBuilder(
                {name: TensorDigest(sums.get(name, state_digest.ZERO), xxh3.get(name, UNSTATED)) for name in names}
            )
        builder = StepBuilder(base.digests)
        for name, gained in sums.items():
            builder.prove_one(name, TensorDigest(state_digest.add(base.digests[name].sums, gained), UNSTATED))
        for name, hashed in xxh3.items():
            builder.prove_one(name, builder.digests[name]._replace(xxh3=hashed))
        builder.changed = len({name for s in shares for name in s.changed})
        builder.changed_elements = sum(sum(s.changed.values()) for s in shares)
        return builder

    def _anchor_is_due(self, link: Link) -> bool:
        """Judged for the step after: the state that this one's anchor would hold may be gone already."""
        policy = self._options.policy
        return policy.wants(*since_anchor(self.repo, link, policy), self.state.files.size)

    # Every rank

    def _adopt(self, captured: CapturedStep, link: Link) -> CapturedStep:
        """An attempt that seemed to fail is published: what is left is what came after it."""
        before = self._tried[link.step]
        self._attempts.clear()
        self._tried.clear()
        self.fresh = False
        deltas = dict(captured.deltas)
        for name, delta in before.deltas.items():
            if name in deltas:
                deltas[name] = since(deltas[name], delta)
        left = {name: delta for name, delta in deltas.items() if len(delta.positions)}
        return replace(captured, deltas=left)

    def _attempt(self, sink: GroupSink, objects: StepObjects, captured: CapturedStep, plan: StepPlan) -> Attempt:
        """This rank's share. An error goes to all ranks with the commit, which then is none."""
        try:
            return self._share(sink, objects, captured, plan), None
        except Exception as error:
            return Share(), error

    def _share(self, sink: GroupSink, objects: StepObjects, captured: CapturedStep, plan: StepPlan) -> Share:
        mine = Share()
        patched = plan.origin is not None and not self.fresh
        if plan.origin is not None and patched:
            mine = self._encode(sink, captured, plan.origin)
            began = time.monotonic()
            mine.parts = objects.wait()
            mine.seconds["put"] += time.monotonic() - began
            self._seconds |= mine.seconds
        mine.nonfinite = captured.nonfinite
        read = self.state.read if plan.whole else self._instead(captured, mine)
        if read is not None:
            began = time.monotonic()
            writer = AnchorWriter(self.group, self.state.files, self.state.tensors, read)
            mine.anchor = writer.write(lambda path, chunks: objects.store(objects.name("anchors", path), chunks))
            mine.xxh3 = dict(writer.xxh3)
            mine.traffic = writer.sent, writer.received, sum(f.size for f in mine.anchor.values())
            if not patched:
                mine.sums = self.state.sums()
            self._seconds["anchor"] = time.monotonic() - began
        return mine

    def _instead(self, captured: CapturedStep, mine: Share) -> Read | None:
        """How to read an anchor in the place of a patch that saves nothing. Of a single rank: others know no size."""
        if self.group.size > 1 or self.base is None:
            return None
        read = self.state.instead(captured, self.base.link)
        return read if saves_nothing(sum(f.size for f in mine.parts), self.state.files.size) else None

    def _encode(self, sink: GroupSink, captured: CapturedStep, origin: Origin) -> Share:
        group, names, options = self.group, set(self.state.tensors), self._options.encode

        def number(index: int) -> int:
            return index * group.size + group.rank + 1  # each number once over all ranks

        return encode_deltas(sink, origin, captured.deltas, names, options, number=number, check=self._check)

    def _check(self) -> None:
        """Stop, in the middle of a file too, when the hook is closed; the store then keeps no trace of it."""
        if self.cancelled:
            raise Cancelled("closed before the step was published")

    def _metrics(self, captured: CapturedStep, size: int) -> StepMetrics:
        changed = sum(sum(s.changed.values()) for s in self.shares)
        if self.group.rank:
            changed = sum(len(d.positions) for d in captured.deltas.values())
        return StepMetrics(
            step=captured.step,
            steps=captured.merged,
            anchor=captured.whole or self.anchored,
            elements=elements_of(self.state.files),
            changed=changed,
            bytes=size,
            queue=0,
            nonfinite=sum(s.nonfinite for s in self.shares) if self.group.rank == 0 else captured.nonfinite,
            seconds={k: round(v, 6) for k, v in self._seconds.items()},
        )
