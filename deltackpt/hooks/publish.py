"""One step, from changes in memory to a manifest that the ref names: every rank its share, the leader the record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from deltackpt.codecs import SCAN_LIMIT
from deltackpt.errors import ConflictError
from deltackpt.format import state_digest
from deltackpt.format.digests import UNSTATED
from deltackpt.format.manifest import File, Link, Manifest
from deltackpt.format.state_digest import Sums, TensorDigest
from deltackpt.hooks.anchors import AnchorWriter, Read
from deltackpt.hooks.metrics import StepMetrics
from deltackpt.hooks.parts import put_parts
from deltackpt.hooks.pending import CapturedStep
from deltackpt.hooks.plan import FilePlan, Global
from deltackpt.hooks.process_group import ProcessGroup, collect, describe, rank_failed, share
from deltackpt.patch.part import Origin, PartWriter
from deltackpt.publish.manifest import AnchorPolicy, compose, elements_of, since_anchor
from deltackpt.publish.step import Draft
from deltackpt.repository import Ref, Repository
from deltackpt.repository.repository import new_folder
from deltackpt.repository.writer_lease import WriterLease
from deltackpt.torch_views.delta import since


@dataclass(frozen=True)
class Base:
    """The step that the next one follows. Only the leader holds its manifest and digests."""

    link: Link
    manifest: Manifest
    digests: Mapping[str, TensorDigest]


Traffic = tuple[int, int, int]  # bytes of an anchor: sent to other ranks, received from them, stored


@dataclass
class Share:
    """What one rank did of a step."""

    parts: list[File] = field(default_factory=list)
    anchor: dict[str, File] = field(default_factory=dict)
    sums: dict[str, Sums] = field(default_factory=dict)
    xxh3: dict[str, bytes] = field(default_factory=dict)
    encodings: dict[str, int] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)  # elements by tensor
    traffic: Traffic = (0, 0, 0)
    nonfinite: int = 0  # elements


@dataclass(frozen=True)
class Begin:
    """What the leader says before a step: the folders of its objects, and what its parts apply to."""

    step: int
    origin: Origin | None
    folders: Mapping[str, str]
    adopted: Link | None  # an attempt that seemed to fail, and took effect
    whole: bool


class Cancelled(Exception):
    """The hook is being closed without publishing the rest."""


class Publisher:
    """Publishes one step at a time; every rank of a team calls `publish` for the same steps in the same order.

    ``read`` gives the words of the box that this rank owns, for an anchor. ``seek`` is the ref that has to be swapped:
    that of ``base``, or of a later step on a rewind.
    """

    def __init__(
        self,
        repo: Repository,
        ref: str,
        team: ProcessGroup,
        plan: Mapping[str, Global],
        files: FilePlan,
        read: Read,
        first_sums: Callable[[], dict[str, Sums]],
        *,
        policy: AnchorPolicy,
        encoding: str = "auto",
        scan_limit: int = SCAN_LIMIT,
        threads: int = 1,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.repo, self.ref, self.team, self.plan, self.files = repo, ref, team, plan, files
        self.base: Base | None = None
        self.fresh = False  # the next step has another state than `base` led to: only an anchor can follow
        self.seek: Ref | None = None
        self.due = False  # the policy wants an anchor at the next step
        self.cancelled = False
        self.lease = WriterLease(repo)  # the leader's, from its first step until it is closed
        self.shares: list[Share] = []  # of the last step, at the leader
        self.traffic: list[Traffic] = []  # of each rank for the last anchor
        self._read, self._first_sums = read, first_sums
        self._policy, self._encoding, self._scan_limit = policy, encoding, scan_limit
        self._threads, self._metadata = threads, dict(metadata or {})
        self._attempts: dict[str, Base] = {}  # by manifest id: what may be published though an error was raised
        self._tried: dict[int, CapturedStep] = {}
        self._seconds: dict[str, float] = {}

    def publish(self, taken: CapturedStep) -> StepMetrics:
        """Raises what the store raises, ConflictError ``ref-moved``, ``lease-lapsed``, StoreError ``rank-failed`` and
        ``rank-lost``; the step is then not published, or, if the store was unclear about it, found out about the next
        time."""
        self._seconds = {"diff": taken.seconds, "wait": taken.waited}
        with ExitStack() as stack:
            begin = share(self.team, lambda: self._begin(taken, stack))
            if begin.adopted is not None:
                taken = self._adopt(taken, begin.adopted)
                if taken.step == begin.adopted.step:
                    return self._metrics(taken, 0)
            draft = Draft(self.repo, begin.step, folders=dict(begin.folders))
            self._tried[taken.step] = taken
            try:
                shares = self._shares(draft, taken, begin)
            except Exception as error:
                # The leader has not begun to commit, and will not: unless nobody can say what became of it.
                if self.team.rank == 0 or getattr(error, "code", "") != "rank-lost":
                    draft.withdraw()
                raise
            self.due = self._commit_or_raise(draft, taken, begin, shares)
        self.shares, self.fresh = shares, False
        if begin.whole and shares:
            self.traffic = [s.traffic for s in shares]
        self._attempts.clear()
        self._tried.clear()
        return self._metrics(taken, sum(f.size for s in shares for f in s.parts))

    def _shares(self, draft: Draft, taken: CapturedStep, begin: Begin) -> list[Share]:
        mine, error = Share(), None
        try:
            mine = self._do_share(draft, taken, begin)
        except Exception as failed:
            error = failed
        return collect(self.team, mine, error)

    def _commit_or_raise(self, draft: Draft, taken: CapturedStep, begin: Begin, shares: list[Share]) -> bool:
        """-> whether the next step is to be an anchor. What a manifest may name is not taken back."""
        failure: Exception | None = None
        outcome: tuple[str, bool, bool] = ("", False, False)  # what went wrong, was it too late to take back, due
        if self.team.rank == 0:
            committing = False
            try:
                manifest = self._record(draft, taken, begin, shares)
                self._check()
                self.lease.check()
                committing = True
                outcome = ("", True, self._commit(manifest, draft))
            except Exception as error:
                failure, outcome = error, (describe(error), committing, False)
        text, committing, due = self.team.broadcast(outcome)
        if text:
            if not committing:
                draft.withdraw()
            raise failure or rank_failed(0, text)
        return bool(due)

    # The leader

    def _begin(self, taken: CapturedStep, stack: ExitStack) -> Begin:
        self._check()
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
        origin = Origin(self.repo.id, taken.step, base.link.id, base.manifest.state) if base else None
        kinds = ("patches", "anchors", "states")
        whole = taken.whole or base is None or self.fresh
        folders = {kind: new_folder(kind, taken.step) for kind in kinds}
        return Begin(taken.step, origin, folders, adopted, whole)

    def _record(self, draft: Draft, taken: CapturedStep, begin: Begin, shares: list[Share]) -> Manifest:
        """Put the shares together, store what the record needs, and make it."""
        base, patched = self.base, self.base is not None and not self.fresh
        began = time.monotonic()
        anchors = {path: file for s in shares for path, file in s.anchor.items()}
        xxh3 = {name: value for s in shares for name, value in s.xxh3.items()}
        sums: dict[str, Sums] = {}
        for s in shares:
            for name, value in s.sums.items():
                sums[name] = state_digest.add(sums.get(name, state_digest.ZERO), value)
        if patched:
            assert base is not None
            for name in sums:
                total = state_digest.add(base.digests[name].sums, sums[name])
                draft.digests[name] = TensorDigest(total, xxh3.get(name, UNSTATED))
            for name, known in base.digests.items():
                new = draft.digests.get(name, known)
                draft.digests[name] = replace(new, xxh3=xxh3[name]) if name in xxh3 else new
            draft.parts = [file for s in shares for file in s.parts]
            changed = {name for s in shares for name in s.changed}
            draft.changed, draft.changed_elements = len(changed), sum(sum(s.changed.values()) for s in shares)
        else:
            draft.digests = {
                name: TensorDigest(sums.get(name, state_digest.ZERO), xxh3.get(name, UNSTATED)) for name in self.plan
            }
        odd = sum(s.nonfinite for s in shares)
        bad = {"nonfinite": odd} if odd else {}
        anchor = tuple(anchors[shard.name] for shard in self.files.shards) if begin.whole else None
        manifest = compose(
            draft,
            self.files,
            base.link if base else None,
            base.manifest if base else None,
            anchor,
            {**bad, **self._metadata, **taken.metadata},
            patched=patched,
        )
        self._seconds["commit"] = time.monotonic() - began
        return manifest

    def _commit(self, manifest: Manifest, draft: Draft) -> bool:
        began = time.monotonic()
        done = Base(manifest.link, manifest, draft.digests)
        self._attempts[done.link.id] = done
        link = self.repo.publish(manifest, self.ref, self.seek, self.lease.check)
        self.lease.published(link)
        self.base, self.seek = done, Ref.to(self.ref, link)
        self._seconds["commit"] += time.monotonic() - began
        return self._anchor_is_due(link)

    def _anchor_is_due(self, link: Link) -> bool:
        """Judged for the step after: an anchor is of a moment, and the moment of this one is gone."""
        return self._policy.wants(*since_anchor(self.repo, link, self._policy, 0), self.files.size)

    # Every rank

    def _adopt(self, taken: CapturedStep, link: Link) -> CapturedStep:
        """An attempt that seemed to fail is published: what is left is what came after it."""
        before = self._tried[link.step]
        self._attempts.clear()
        self._tried.clear()
        self.fresh = False
        deltas = dict(taken.deltas)
        for name, delta in before.deltas.items():
            if name in deltas:
                deltas[name] = since(deltas[name], delta)
        left = {name: delta for name, delta in deltas.items() if len(delta.positions)}
        return replace(taken, deltas=left)

    def _do_share(self, draft: Draft, taken: CapturedStep, begin: Begin) -> Share:
        mine = Share(nonfinite=taken.nonfinite)
        patched = begin.origin is not None and not self.fresh
        if begin.origin is not None and patched:
            self._put_parts(mine, draft, taken, begin.origin)
        if begin.whole:
            began = time.monotonic()
            writer = AnchorWriter(self.team, self.files, self.plan, self._read)
            mine.anchor = writer.write(
                lambda path, chunks: draft.store(draft.name("anchors", path), self._live(chunks))
            )
            mine.xxh3 = dict(writer.xxh3)
            mine.traffic = writer.sent, writer.received, sum(f.size for f in mine.anchor.values())
            if not patched:
                mine.sums = self._first_sums()
            self._seconds["anchor"] = time.monotonic() - began
        return mine

    def _put_parts(self, mine: Share, draft: Draft, taken: CapturedStep, origin: Origin) -> None:
        def put(index: int, part: PartWriter) -> File:
            number = index * self.team.size + self.team.rank + 1
            return draft.store(draft.name("patches", f"part-{number:05d}.safetensors"), self._live(part.chunks()))

        parts = put_parts(
            taken.deltas, origin, set(self.plan), put, self._check,
            encoding=self._encoding, scan_limit=self._scan_limit, threads=self._threads,
        )  # fmt: skip
        mine.parts, mine.sums, mine.xxh3 = parts.files, parts.sums, parts.xxh3
        mine.encodings, mine.changed = parts.encodings, parts.changed
        self._seconds |= parts.seconds

    def _live(self, chunks: Iterator[Any]) -> Iterator[Any]:
        """Stop in the middle of a file when the hook is closed; the store then leaves no trace of it."""
        for chunk in chunks:
            self._check()
            yield chunk

    def _check(self) -> None:
        if self.cancelled:
            raise Cancelled("closed before the step was published")

    def _metrics(self, taken: CapturedStep, size: int) -> StepMetrics:
        changed = sum(sum(s.changed.values()) for s in self.shares)
        if self.team.rank:
            changed = sum(len(d.positions) for d in taken.deltas.values())
        return StepMetrics(
            step=taken.step,
            steps=taken.merged,
            anchor=taken.whole,
            elements=elements_of(self.files),
            changed=changed,
            bytes=size,
            queue=0,
            nonfinite=sum(s.nonfinite for s in self.shares) if self.team.rank == 0 else taken.nonfinite,
            seconds={k: round(v, 6) for k, v in self._seconds.items()},
        )
