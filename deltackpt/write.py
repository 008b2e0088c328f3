"""Publish a checkpoint directory as the next step: an anchor first, patches after."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from deltackpt import __version__, digest
from deltackpt.bits import DTYPES, uint
from deltackpt.cache import apply_to_cache
from deltackpt.checkpoint import Checkpoint
from deltackpt.codecs import SCAN_LIMIT, Entry, encode
from deltackpt.codecs.table import REMOVED
from deltackpt.diff import Difference, State, difference
from deltackpt.digest import TensorDigest
from deltackpt.errors import ChainError, CheckpointError, ConflictError, DeltackptError, NotFoundError, UsageError
from deltackpt.format import digests as digests_format
from deltackpt.format.layout import Layout, Shard, Side
from deltackpt.format.manifest import Counts, File, Link, Manifest
from deltackpt.leases import lease
from deltackpt.parallel import ordered_map, threads_or_default
from deltackpt.patch import RESERVED, Origin, PartWriter, collides
from deltackpt.progress import SILENT, Progress
from deltackpt.replay import Replay
from deltackpt.repository import Repository, new_folder
from deltackpt.store import Buffer

PART_BYTES = 128 << 20  # encoded bytes after which a part is written and the next one begun
PIECE = 8 << 20
ANCHOR_RATIO = 1.0  # patches since the last anchor, in anchors' bytes: restoring reads at most twice an anchor


@dataclass(frozen=True)
class AnchorPolicy:
    """When a step is also stored whole: now, every so many steps, when the cheapest way from an anchor reads patches of
    ``ratio`` times the checkpoint, or when a step changes more than a share of ``density`` of all elements.

    The first step of a repository always is.
    """

    now: bool = False
    every: int | None = None
    ratio: float = ANCHOR_RATIO
    density: float | None = None

    def wants(self, steps: int, patches: int, whole: int, density: float = 0.0) -> bool:
        dense = self.density is not None and density > self.density
        return self.now or dense or (self.every is not None and steps >= self.every) or patches > self.ratio * whole


@dataclass(frozen=True)
class WriteResult:
    """What `write` published. Bytes are those of new objects; ``bits_per_change`` counts the parts, headers
    included.
    """

    repository: str
    ref: str
    step: int
    id: str
    parent: int | None
    state: str
    anchor: bool
    tensors: dict[str, int]  # added, removed, changed, and how many in each encoding
    elements: int
    changed: int
    density: float
    patch_bytes: int
    bytes: int
    bits_per_change: float | None
    left_out: list[tuple[str, str]]
    seconds: float
    rewound: int | None = None  # the step that the ref was at, where it was taken back

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Draft:
    """A step in the making: objects put so far, and what is known of the new state."""

    repo: Repository
    step: int
    put: list[File] = field(default_factory=list)
    parts: list[File] = field(default_factory=list)
    digests: dict[str, TensorDigest] = field(default_factory=dict)
    encodings: Counter[str] = field(default_factory=Counter)
    added: int = 0
    removed: int = 0
    changed: int = 0
    changed_elements: int = 0
    folders: dict[str, str] = field(default_factory=dict)

    def name(self, kind: str, path: str) -> str:
        return f"{self.folders.setdefault(kind, new_folder(kind, self.step))}/{path}"

    def store(self, name: str, chunks: Iterator[Buffer] | list[Buffer]) -> File:
        self.put.append(self.repo.put(name, chunks))
        return self.put[-1]

    def withdraw(self) -> None:
        """Take back what no manifest names yet; gc finds what this misses."""
        for file in self.put:
            with suppress(DeltackptError, OSError):
                self.repo.store.delete(file.name)


def write(
    checkpoint: str | os.PathLike[str],
    repository: str | os.PathLike[str],
    *,
    step: int | None = None,
    resume_from: int | str | None = None,
    base: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    encoding: str = "auto",
    anchor: AnchorPolicy = AnchorPolicy(),
    ref: str = "main",
    threads: int | None = None,
    scan_limit: int = SCAN_LIMIT,
    metadata: Mapping[str, Any] | None = None,
    progress: Progress = SILENT,
) -> WriteResult:
    """Publish ``checkpoint`` as the next step of ``repository``, which is made if there is none.

    The old values are the repository's own, rebuilt from anchor and chain; ``base``, the parent step's directory, or
    ``cache``, a managed cache that is brought along, saves that work and is proven tensor by tensor in the pass that
    compares. ``resume_from`` takes the ref back to a step on purpose: the new step follows that one, and those after it
    are left behind, readable until gc. Raises ConflictError ``step-order`` (not after the ref's step), ``ref-moved``;
    ChainError ``base-differs``; CheckpointError; then nothing is published.
    """
    began = time.monotonic()
    if base is not None and cache is not None:
        raise UsageError("base-and-cache", where="write", have="a base and a cache", need="one of them")
    with Checkpoint.open(checkpoint) as new, ExitStack() as stack:
        _check_names(new)
        repo = Repository.open_or_create(repository)
        head = repo.ref(ref)
        before = head.link if head else None
        if resume_from is not None:
            before = repo.find(resume_from, ref)
        # Pins the parent, and, with nothing to pin, whatever is put before the manifest names it.
        stack.enter_context(lease(repo, before))
        draft = _Draft(repo, _next_step(repo, ref, before, step))
        parent = repo.load(before) if before else None
        count = threads_or_default(threads)
        try:
            if parent is None:
                progress.start("digest", sum(s.size for s in new.shards))
                draft.digests = _digest_all(new, count, progress)
            else:
                old: State
                if cache is not None:
                    at = f"{parent.step}-{before.id}" if before else "latest"
                    base = apply_to_cache(repo, cache, at, ref=ref, threads=threads, progress=progress).path
                if base is not None:
                    old = stack.enter_context(Checkpoint.open(base))
                    _check_base(old, repo.layout(parent), Path(base))
                else:
                    old = stack.enter_context(Replay.open(repo, repo.resolve(before or parent.link)))
                progress.start("write", sum(s.size for s in new.shards))
                _put_parts(draft, parent, old, new, encoding, count, scan_limit, base, progress)
            manifest = _manifest(draft, new, before, parent, anchor, dict(metadata or {}), progress)
            new.verify_unchanged()
        except BaseException:
            draft.withdraw()
            raise
        link = repo.publish(manifest, ref, head)  # from here on nothing is taken back: it may have taken effect
        if cache is not None:
            apply_to_cache(repo, cache, ref=ref, threads=threads, progress=progress)
        rewound = head.link.step if head and head.link != before else None
        return replace(_result(draft, manifest, link, ref, new, began), rewound=rewound)


def _next_step(repo: Repository, ref: str, before: Link | None, step: int | None) -> int:
    if step is None:
        return before.step + 1 if before else 0
    if before and step <= before.step:
        raise ConflictError(
            "step-order",
            where=f"{repo.store.url}, ref {ref}",
            have=f"step {before.step} already",
            need=f"a step after it, not {step}",
            hint="Leave --step out to follow the ref, go back with --resume-from N, or use a --ref of its own.",
        )
    if step < 0:
        raise UsageError("step-negative", where="--step", have=step, need="0 or more")
    return step


def _check_names(new: Checkpoint) -> None:
    for name in new.tensors:
        if name.startswith(RESERVED):
            need = f"no name that starts with {RESERVED!r}"
            raise CheckpointError("name-reserved", where=new.root, have=f"tensor {name[:80]!r}", need=need)


def _digest_all(new: Checkpoint, threads: int, progress: Progress) -> dict[str, TensorDigest]:
    def one(name: str) -> tuple[str, TensorDigest, int]:
        data, dtype = new.bytes_of(name), DTYPES[new.tensors[name].dtype]
        sums, xxh3 = digest.ZERO, xxhash.xxh3_128()
        for at in range(0, len(data), PIECE):
            piece = data[at : at + PIECE]
            sums = digest.add(sums, digest.of_run(piece.view(uint(dtype.width)), at // dtype.width))
            xxh3.update(piece.data)
            new.release(name, at, at + len(piece))
        return name, TensorDigest(sums, xxh3.digest()), len(data)

    found = {}
    for name, value, size in ordered_map(one, new.tensors, threads):
        found[name] = value
        progress.advance(size)
    return found


def _check_base(base: Checkpoint, parent: Layout, where: Path) -> None:
    have = {name: (t.dtype, t.shape) for name, t in base.tensors.items()}
    need = {name: (t.dtype, t.shape) for name, t in parent.tensors.items()}
    if have != need:
        odd = sorted(name for name in {*have, *need} if have.get(name) != need.get(name))
        raise base_differs(where, odd)


def base_differs(where: str | os.PathLike[str], names: list[str]) -> ChainError:
    shown = ", ".join(name[:80] for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return ChainError(
        "base-differs",
        where=where,
        have=f"other tensors than the parent step ({shown})",
        need="exactly the parent step",
        hint="Give the directory of the step that the ref is at, or leave --base out: it only saves time.",
    )


@dataclass(frozen=True)
class _Ready:
    """A tensor, compared and encoded."""

    name: str
    difference: Difference
    entry: Entry | None
    encoded: Any
    after: TensorDigest | None
    size: int


def _put_parts(
    draft: _Draft,
    parent: Manifest,
    old: State,
    new: Checkpoint,
    encoding: str,
    threads: int,
    scan_limit: int,
    base: str | os.PathLike[str] | None,
    progress: Progress,
) -> None:
    """Compare, prove, encode and store every tensor, streaming; fills the draft's parts and digests."""
    before = draft.repo.digests(parent)
    all_names = {*old.tensors, *new.tensors}
    wrong: list[str] = []

    def prepare(name: str) -> _Ready:
        found = difference(name, old, new)
        if found.old_xxh3 is not None and (name not in before or before[name].xxh3 != found.old_xxh3):
            wrong.append(name)
        entry, encoded, after = _encode(found, before.get(name), new, encoding, scan_limit, all_names)
        if name in old.tensors:
            old.release(name)
        if name in new.tensors:
            new.release(name)
        return _Ready(name, found, entry, encoded, after, 0 if found.change is None else found.change.target.nbytes)

    origin = Origin(draft.repo.id, draft.step, parent.link.id, parent.state)
    writer = PartWriter(origin)
    for ready in ordered_map(prepare, sorted(all_names, key=str.encode), threads):
        progress.advance(ready.size)
        _count(draft, ready)
        if ready.after is not None:
            draft.digests[ready.name] = ready.after
        if ready.entry is not None:
            writer.add(ready.entry, ready.encoded)
        if writer.size >= PART_BYTES:
            _put_part(draft, writer)
            writer = PartWriter(origin)
    if wrong:
        raise base_differs(base or draft.repo.store.url, sorted(wrong))
    if len(writer):
        _put_part(draft, writer)


def _put_part(draft: _Draft, writer: PartWriter) -> None:
    name = draft.name("patches", f"part-{len(draft.parts) + 1:05d}.safetensors")
    draft.parts.append(draft.store(name, writer.chunks()))


def _encode(
    found: Difference, before: TensorDigest | None, new: Checkpoint, encoding: str, scan_limit: int, names: set[str]
) -> tuple[Entry | None, Any, TensorDigest | None]:
    change = found.change
    if change is None:
        return Entry(found.name, "removed", REMOVED), None, None
    assert found.new_xxh3 is not None
    if found.empty:
        assert before is not None
        return None, None, TensorDigest(before.sums, found.new_xxh3)
    if change.base is None or before is None:
        sums = digest.of_run(change.target)
    else:
        sums = digest.add(before.sums, digest.of_change(change.positions, change.old, change.new))
    shape = new.tensors[found.name].shape
    chosen, encoded = encode(change, shape, encoding, scan_limit=scan_limit)
    entry = Entry(found.name, chosen, change.dtype, shape, shape, (0,) * len(shape), encoded.detail)
    if collides(entry, names):
        chosen, encoded = encode(change, shape, "full")
        entry = replace(entry, encoding=chosen, detail=encoded.detail)
    return entry, encoded, TensorDigest(sums, found.new_xxh3)


def _count(draft: _Draft, ready: _Ready) -> None:
    change = ready.difference.change
    if ready.entry is None:
        return
    draft.encodings[ready.entry.encoding] += 1
    if change is None:
        draft.removed += 1
    elif change.base is None:
        draft.added += ready.difference.old_xxh3 is None
        draft.changed += ready.difference.old_xxh3 is not None
        draft.changed_elements += change.elements
    else:
        draft.changed += 1
        draft.changed_elements += len(change.positions)


def _manifest(
    draft: _Draft,
    new: Checkpoint,
    before: Link | None,
    parent: Manifest | None,
    policy: AnchorPolicy,
    metadata: dict[str, Any],
    progress: Progress,
) -> Manifest:
    """Store what else the step needs, and put its record together."""
    whole = sum(s.size for s in new.shards)
    elements = sum((t.end - t.start) // DTYPES[t.dtype].width for t in new.tensors.values())
    density = draft.changed_elements / max(1, elements)
    anchored = parent is None or before is None or policy.wants(*_since_anchor(draft, before, policy), whole, density)
    anchor = None
    if anchored:
        progress.start("anchor", whole)
        anchor = tuple(
            draft.store(draft.name("anchors", s.name), _file_chunks(new, s.name, progress)) for s in new.shards
        )
    known = {} if anchored or parent is None else {s.file.sha256: s.file for s in draft.repo.layout(parent).side}
    shards = tuple(Shard(s.name, s.header) for s in new.shards)
    layout = Layout(shards, tuple(Side(path, _side(draft, new, path, known, anchored)) for path in new.side))
    raw = layout.encode()
    same = parent is not None and hashlib.sha256(raw).hexdigest() == parent.layout.sha256
    layout_file = parent.layout if parent and same else draft.store(draft.name("states", "layout.json"), [raw])
    table = digests_format.encode(layout, draft.digests)
    digests_file = draft.store(draft.name("states", "digests.safetensors"), [table])
    return Manifest(
        repository=draft.repo.id,
        step=draft.step,
        parent=before,
        base=parent.state if parent else None,
        state=digests_format.state_of(layout, draft.digests),
        anchor=anchor,
        patch=tuple(draft.parts) if parent else None,
        layout=layout_file,
        digests=digests_file,
        counts=Counts(draft.added, draft.removed, draft.changed, elements, draft.changed_elements),
        time=int(time.time()),
        producer=f"deltackpt {__version__}",
        metadata=metadata,
    )


def _since_anchor(draft: _Draft, before: Link, policy: AnchorPolicy) -> tuple[int, int]:
    """Steps since the last anchor, this one included, and bytes of patches and folds that a cold start reads."""
    repo = draft.repo
    patches = sum(hop.bytes for hop in repo.resolve(before).patches) + sum(f.size for f in draft.parts)
    return (1 if policy.every is None else _steps_since_anchor(repo, before, policy.every)), patches


def _steps_since_anchor(repo: Repository, before: Link, most: int) -> int:
    edges, steps, link = repo.edges(), 1, before
    while steps < most:
        try:
            found = repo.load(link)
        except NotFoundError:  # collected: nobody knows how many there were
            return most
        if found.anchor is not None or any(e.start is None for e in edges.get(link, ())) or found.parent is None:
            break
        steps, link = steps + 1, found.parent
    return steps


def _file_chunks(new: Checkpoint, name: str, progress: Progress) -> Iterator[Buffer]:
    with (new.root / name).open("rb") as file:
        while piece := file.read(PIECE):
            yield piece
            progress.advance(len(piece))


def _side(draft: _Draft, new: Checkpoint, path: str, known: dict[str, File], anchored: bool) -> File:
    data = (new.root / path).read_bytes()
    if (file := known.get(hashlib.sha256(data).hexdigest())) is not None:
        return file
    return draft.store(draft.name("anchors", path) if anchored else draft.name("patches", f"side/{path}"), [data])


def _result(draft: _Draft, m: Manifest, link: Link, ref: str, new: Checkpoint, began: float) -> WriteResult:
    changed, patch = m.counts.changed_elements, sum(f.size for f in draft.parts)
    return WriteResult(
        repository=draft.repo.store.url,
        ref=ref,
        step=m.step,
        id=link.id,
        parent=m.parent.step if m.parent else None,
        state=m.state,
        anchor=m.anchor is not None,
        tensors={"added": draft.added, "removed": draft.removed, "changed": draft.changed, **draft.encodings},
        elements=m.counts.elements,
        changed=changed,
        density=changed / m.counts.elements if m.counts.elements else 0.0,
        patch_bytes=patch,
        bytes=sum(f.size for f in draft.put),
        bits_per_change=8 * patch / changed if changed else None,
        left_out=list(new.left_out),
        seconds=round(time.monotonic() - began, 3),
    )
