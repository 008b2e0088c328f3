"""The manifest of a step in the making: when it is also stored whole, its layout, its digests, its record."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from deltackpt import __version__
from deltackpt.errors import NotFoundError, UsageError
from deltackpt.format import digests as digests_format
from deltackpt.format.layout import Layout, Shard, Side
from deltackpt.format.manifest import MAX_STEP, File, Link, Manifest, decode
from deltackpt.publish.objects import StepObjects
from deltackpt.publish.sink import StepCommit
from deltackpt.publish.uploads import done
from deltackpt.repository import Repository

ANCHOR_RATIO = 1.0  # patches since the last anchor, in anchors' bytes: restoring reads at most twice an anchor

WORTH = 0.95  # of the checkpoint's bytes: a patch that has more saves nothing beside an anchor of the same step


def saves_nothing(patch_bytes: int, whole: int) -> bool:
    """Is a patch about as large as the ``whole`` checkpoint? Where that is stored anyway, the patch is left out."""
    return patch_bytes > WORTH * whole


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

    def __post_init__(self) -> None:
        """Raises UsageError ``usage`` for a value that no step could meet, or every one does unmeant, such as NaN."""
        if self.every is not None and self.every < 1:
            raise _no_policy("every", self.every, "a number of steps, 1 or more")
        if not self.ratio >= 0:
            raise _no_policy("ratio", self.ratio, "a number of checkpoints, 0 or more")
        if self.density is not None and not self.density >= 0:
            raise _no_policy("density", self.density, "a share of the elements, 0 or more")

    def wants(self, steps: int, patches: int, whole: int, density: float = 0.0) -> bool:
        """Is a step to be stored whole? ``steps`` since the last anchor, this one included; bytes of the ``patches``
        that a cold start reads, and of the ``whole`` checkpoint; ``density``: the share of elements that the step
        changes.
        """
        dense = self.density is not None and density > self.density
        return self.now or dense or (self.every is not None and steps >= self.every) or patches > self.ratio * whole


def _no_policy(name: str, value: object, need: str) -> UsageError:
    return UsageError("usage", where=f"the anchor policy, {name}", have=value, need=need)


def check_step(step: int) -> int:
    """The number of a step that is to be published. Raises UsageError ``step-negative``, and ``usage`` for one that no
    manifest can hold.
    """
    if step < 0:
        raise UsageError("step-negative", where="--step", have=step, need="0 or more")
    if step > MAX_STEP:
        raise UsageError("usage", where="--step", have=step, need=f"a number up to {MAX_STEP:,}")
    return step


def build_manifest(
    objects: StepObjects,
    commit: StepCommit,
    before: Link | None,
    parent: Manifest | None,
    parts: Sequence[File] | None,
    anchor: tuple[File, ...] | None,
) -> Manifest:
    """Put side files, layout and digests, and build the manifest that names them; all objects are then durable.

    ``parts`` and ``anchor`` are durable already; ``parts`` None: those that were put by ``objects``. ``parent`` is the
    manifest of ``before``. Raises FormatError for a record that no reader would accept.
    """
    known = {} if anchor is not None or parent is None else _side_files(objects.repo, parent)
    side = tuple(Side(path, _side(objects, commit, path, known, anchor is not None)) for path in commit.files.side)
    layout = Layout(tuple(Shard(s.path, s.header) for s in commit.files.shards), side)
    raw = layout.encode()
    same = parent if parent and hashlib.sha256(raw).hexdigest() == parent.layout.sha256 else None
    layout_file = done(same.layout) if same else objects.begin(objects.name("states", "layout.json"), [raw])
    table = digests_format.encode(layout, commit.digests)
    kept = parent if parent and hashlib.sha256(table).hexdigest() == parent.digests.sha256 else None
    digests_file = done(kept.digests) if kept else objects.begin(objects.name("states", "digests.safetensors"), [table])
    own = objects.wait()
    made = Manifest(
        repository=objects.repo.id,
        step=objects.step,
        parent=before,
        base=parent.state if parent else None,
        state=commit.state,
        anchor=anchor,
        patch=tuple(own if parts is None else parts) if parent and commit.patched else None,
        layout=layout_file.result(),
        digests=digests_file.result(),
        counts=commit.counts,
        time=int(time.time()),
        producer=f"deltackpt {__version__}",
        metadata=dict(commit.metadata),
    )
    decode(made.encode(), f"the record of step {objects.step}")  # what no reader would accept is not published
    return made


def _side_files(repo: Repository, step: Manifest) -> dict[str, File]:
    """The objects of a step's side files, by sha256."""
    return {side.file.sha256: side.file for side in repo.layout(step).side}


def _side(objects: StepObjects, commit: StepCommit, path: str, known: dict[str, File], anchored: bool) -> File:
    data = commit.files.side_bytes(path)
    if (file := known.get(hashlib.sha256(data).hexdigest())) is not None:
        return file
    name = objects.name("anchors", path) if anchored else objects.name("patches", f"side/{path}")
    return objects.store(name, [data])


def since_anchor(repo: Repository, before: Link, policy: AnchorPolicy) -> tuple[int, int]:
    """Steps since the last anchor, the one after ``before`` included, and bytes of patches and folds that a cold start
    reads; 0 where the policy does not ask for them."""
    patches = sum(hop.bytes for hop in repo.resolve(before).patches) if policy.ratio != inf else 0
    return (1 if policy.every is None else _steps_since_anchor(repo, before, policy.every)), patches


def _steps_since_anchor(repo: Repository, before: Link, most: int) -> int:
    edges, steps, link = repo.edges(), 1, before
    while steps < most:
        try:
            found = repo.load(link)
        except NotFoundError:  # collected: how many there were is not known
            return most
        if found.anchor is not None or any(e.start is None for e in edges.get(link, ())) or found.parent is None:
            break
        steps, link = steps + 1, found.parent
    return steps
