"""The record of a step in the making: anchor, layout, digests, manifest."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

from deltackpt import __version__
from deltackpt.checkpoint import Checkpoint
from deltackpt.checkpoint.diff import StoredTensor
from deltackpt.errors import NotFoundError
from deltackpt.format import digests as digests_format
from deltackpt.format.dtypes import DTYPES, nbytes
from deltackpt.format.layout import Layout, Shard, Side
from deltackpt.format.manifest import Counts, File, Link, Manifest, decode
from deltackpt.publish.step import PIECE, Draft
from deltackpt.publish.uploads import done
from deltackpt.repository import Repository
from deltackpt.store import Buffer
from deltackpt.util.progress import Progress

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


class Whole(Protocol):
    """A step as its record sees it: a checkpoint directory, or what a trainer has in memory."""

    @property
    def shards(self) -> Sequence[Shard]: ...
    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...
    @property
    def side(self) -> Sequence[str]:
        """Paths of the side files."""

    def side_bytes(self, path: str) -> bytes: ...


def record(
    draft: Draft,
    new: Checkpoint,
    before: Link | None,
    parent: Manifest | None,
    policy: AnchorPolicy,
    metadata: dict[str, Any],
    progress: Progress,
    since: Callable[[], tuple[int, int]] | None = None,
) -> Manifest:
    """Store what else the step needs, and put its record together. ``since`` is `since_anchor`, if it is known."""
    whole = sum(s.size for s in new.shards)
    density = draft.changed_elements / max(1, elements_of(new))
    anchor = None
    wanted = parent is None or before is None
    if before is not None and not wanted:
        steps, patches = since() if since else since_anchor(draft.repo, before, policy)
        wanted = policy.wants(steps, patches + draft.patch_bytes, whole, density)
    if wanted:
        progress.start("anchor", whole)
        anchor = tuple(
            draft.store(draft.name("anchors", s.path), _file_chunks(new, s.path, progress)) for s in new.shards
        )
    return compose(draft, new, before, parent, anchor, metadata)


def elements_of(new: Whole) -> int:
    """Storage elements of a state."""
    return sum(nbytes(DTYPES[t.dtype], t.shape) // DTYPES[t.dtype].width for t in new.tensors.values())


def compose(
    draft: Draft,
    new: Whole,
    before: Link | None,
    parent: Manifest | None,
    anchor: tuple[File, ...] | None,
    metadata: dict[str, Any],
    *,
    patched: bool = True,
) -> Manifest:
    """Store side files, layout and digests, and put the record together; parts and anchor are stored already.

    Without ``patched`` the step follows its parent by name alone, and only its anchor leads to it.
    """
    anchored = anchor is not None
    known = {} if anchored or parent is None else {s.file.sha256: s.file for s in draft.repo.layout(parent).side}
    shards = tuple(Shard(s.path, s.header) for s in new.shards)
    layout = Layout(shards, tuple(Side(path, _side(draft, new, path, known, anchored)) for path in new.side))
    raw = layout.encode()
    same = parent if parent and hashlib.sha256(raw).hexdigest() == parent.layout.sha256 else None
    layout_file = done(same.layout) if same else draft.begin(draft.name("states", "layout.json"), [raw])
    table = digests_format.encode(layout, draft.digests)
    digests_file = draft.begin(draft.name("states", "digests.safetensors"), [table])
    draft.settle()
    made = Manifest(
        repository=draft.repo.id,
        step=draft.step,
        parent=before,
        base=parent.state if parent else None,
        state=digests_format.state_of(layout, draft.digests),
        anchor=anchor,
        patch=tuple(draft.parts) if parent and patched else None,
        layout=layout_file.result(),
        digests=digests_file.result(),
        counts=Counts(draft.added, draft.removed, draft.changed, elements_of(new), draft.changed_elements),
        time=int(time.time()),
        producer=f"deltackpt {__version__}",
        metadata=metadata,
    )
    decode(made.encode(), f"the record of step {draft.step}")  # what no reader would take is not published
    return made


def since_anchor(repo: Repository, before: Link, policy: AnchorPolicy, new_bytes: int = 0) -> tuple[int, int]:
    """Steps since the last anchor, the one after ``before`` included, and bytes of patches and folds that a cold start
    reads, ``new_bytes`` included; of patches nothing where the policy does not ask."""
    patches = new_bytes + (sum(hop.bytes for hop in repo.resolve(before).patches) if policy.ratio != inf else 0)
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


def _side(draft: Draft, new: Whole, path: str, known: dict[str, File], anchored: bool) -> File:
    data = new.side_bytes(path)
    if (file := known.get(hashlib.sha256(data).hexdigest())) is not None:
        return file
    return draft.store(draft.name("anchors", path) if anchored else draft.name("patches", f"side/{path}"), [data])
