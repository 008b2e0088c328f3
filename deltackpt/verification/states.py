"""Every step rebuilt and proven: an anchor by itself, the others along the patches from an anchor, or by a fold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from deltackpt import kernels
from deltackpt.checkpoint.diff import State
from deltackpt.errors import ChainError
from deltackpt.format import state_digest
from deltackpt.format.digests import UNSTATED
from deltackpt.format.dtypes import DTYPES, uint
from deltackpt.format.edge import Edge
from deltackpt.format.layout import Layout
from deltackpt.format.manifest import File, Link, Manifest
from deltackpt.format.safetensors_header import Tensor
from deltackpt.format.state_digest import TensorDigest
from deltackpt.patch.base import describe
from deltackpt.patch.many import RunRoom, TensorRun, advance_run
from deltackpt.repository import Repository
from deltackpt.repository.chain import Hop
from deltackpt.restore.anchor import Anchor
from deltackpt.restore.materialize import hash_run, rows_of, runs_of, unproven
from deltackpt.restore.patch_reader import PatchReader
from deltackpt.restore.replay import Replay
from deltackpt.verification.findings import Findings
from deltackpt.verification.tensor import check_stored, tensor_differs


@dataclass
class Checks:
    """What is checked, and the steps whose states were proven so far."""

    repo: Repository
    findings: Findings
    steps: Mapping[str, Manifest]
    threads: int
    reached: set[str] = field(default_factory=set)
    children: dict[str, list[Manifest]] = field(default_factory=dict)


Run = list[tuple[Manifest, Hop | None]]  # steps in order, each with the hop that leads to it


def check_states(checks: Checks, edges: Sequence[Edge]) -> None:
    """Rebuild and prove every step: an anchor by itself, the others along the patches from an anchor, or by a fold."""
    for m in checks.steps.values():
        if m.patch is not None and m.parent is not None:
            checks.children.setdefault(m.parent.id, []).append(m)
    anchors: list[tuple[Manifest, str, tuple[File, ...]]] = [
        (m, id_, m.anchor) for id_, m in checks.steps.items() if m.anchor is not None
    ]
    for edge in edges:
        if edge.start is None and edge.end.id in checks.steps:
            anchors.append((checks.steps[edge.end.id], edge.end.id, edge.files))
    for step, id_, files in sorted(anchors, key=lambda item: item[0].step):
        state = checks.findings.attempt("anchors", Anchor, checks.repo, step, files)
        if state is None:
            continue
        checks.findings.attempt("anchors", _check_heads, checks.repo, step, files)
        _check_anchor(checks, step, state)
        if id_ not in checks.reached:  # else a chain that passes through it has been here already
            _check_runs(checks, [(step, None)], state, {id_})
    for edge in sorted(edges, key=lambda edge: edge.end.step):
        if edge.start is not None and edge.start.id in checks.reached and edge.end.id in checks.steps:
            checks.findings.attempt("folds", _check_fold, checks, edge, edge.start)
    for id_, m in checks.steps.items():
        if id_ not in checks.reached:
            have = "no intact way from an anchor"
            error = ChainError("chain-broken", where=f"step {m.step}", have=have, need="an unbroken chain")
            checks.findings.add(error)


def _check_anchor(checks: Checks, step: Manifest, state: Anchor) -> None:
    """Every tensor of an anchor against the digests of its step."""
    digests, where = checks.repo.digests(step), f"anchor of step {step.step}"

    def at_once(tensors: list[Tensor]) -> bool:
        data = state.side_by_side([tensor.name for tensor in tensors])
        if data is None or unproven(TensorRun(tensors, data, checks.repo.layout(step).named), digests) is not None:
            return False
        state.release(tensors[0].name, 0, len(data))
        return True

    def one(name: str) -> None:
        check_stored(state, state.tensors[name], name, digests, where)

    held = (run for _, run in runs_of(checks.repo.layout(step)))
    checks.findings.each_run("tensors", held, at_once, (), one, checks.threads)


def _check_heads(repo: Repository, step: Manifest, files: Sequence[File]) -> None:
    """Readers use the headers of the layout; tools that load an anchor without deltackpt use those of its files."""
    for file, shard in zip(files, repo.layout(step).shards, strict=True):
        if repo.store.get_range(file.name, 0, shard.header.data_start) != shard.header.head:
            where = f"{repo.store.url}/{file.name}"
            raise ChainError("anchor-files", where=where, have="another header", need="the header of the layout")


def _check_fold(checks: Checks, edge: Edge, start: Link) -> None:
    """Rebuild the step where a fold begins, apply it, and continue from there if nothing else led there."""
    plan = checks.repo.resolve(start)
    assert plan.anchor is not None
    run: Run = [(plan.anchor, None), *((checks.repo.load(hop.end), hop) for hop in plan.patches)]
    base = checks.repo.load(start).state
    run.append((checks.repo.load(edge.end), Hop(edge.repository, start, edge.end, base, edge.files, fold=True)))
    state = Anchor(checks.repo, plan.anchor, plan.whole)
    if edge.end.id in checks.reached:
        _check_run(checks, run, state, {edge.end.id})
    else:
        _check_runs(checks, run, state, {edge.end.id})


def _check_runs(checks: Checks, begin: Run, state: State, anew: set[str]) -> None:
    """A run, and all that follows it by patches."""
    pending = [begin]
    while pending:
        run = _extend(pending.pop(), checks.children)
        _check_run(checks, run, state, anew)
        children = checks.children.get(run[-1][0].link.id, [])
        pending += [[*run, (child, Hop.of(child))] for child in children if child.link.id not in checks.reached]


def _extend(run: Run, children: Mapping[str, list[Manifest]]) -> Run:
    """A run, as far as the chain does not fork."""
    run = list(run)
    while len(following := children.get(run[-1][0].link.id, [])) == 1:
        run.append((following[0], Hop.of(following[0])))
    return run


def _check_run(checks: Checks, run: Run, state: State, anew: set[str]) -> None:
    """Apply the hops of a run one by one; prove every tensor of every step in ``anew``, or not reached before."""
    repo, findings = checks.repo, checks.findings
    with ExitStack() as stack:
        patches: list[PatchReader] = []
        for _, hop in run[1:]:
            assert hop is not None
            opened = findings.attempt("patches", lambda h=hop: stack.enter_context(PatchReader.open(repo, h)))
            if opened is None:
                break
            patches.append(opened)
        steps = [m for m, _ in run[: len(patches) + 1]]
        layouts, digests = [repo.layout(m) for m in steps], [repo.digests(m) for m in steps]
        ids = [m.link.id for m in steps]
        fresh = [id_ in anew or id_ not in checks.reached for id_ in ids]
        states = _States(steps, layouts, digests, patches, fresh, Replay(state, patches, layouts[0]))
        held = (run for _, run in runs_of(layouts[0]))
        rest = {name for layout in layouts[1:] for name in layout.tensors.keys() - layouts[0].tensors.keys()}
        findings.each_run("tensors", held, states.check_run, rest, states.check, checks.threads)
        checks.reached.update(ids)


class _States:
    """The states of a run of steps: ``fresh`` says which are to be proven, the others were."""

    def __init__(
        self,
        steps: Sequence[Manifest],
        layouts: Sequence[Layout],
        digests: Sequence[Mapping[str, TensorDigest]],
        patches: Sequence[PatchReader],
        fresh: Sequence[bool],
        replay: Replay,
    ) -> None:
        self._steps, self._layouts, self._digests = steps, layouts, digests
        self._patches, self._fresh, self._replay = patches, fresh, replay
        self._room = RunRoom()

    def check_run(self, tensors: list[Tensor]) -> bool:
        """Are neighbors of the first step the tensors of all steps, and as they say? False also where any changes its
        dtype or shape on the way: `check` says what is so."""
        run = self._room.run(tensors, self._layouts[0].named)
        for layout in self._layouts[1:]:
            for tensor in tensors if layout is not self._layouts[0] else ():
                want = layout.tensors.get(tensor.name)
                if want is None or (want.dtype, want.shape) != (tensor.dtype, tensor.shape):
                    return False
        if not self._replay.read_base(run):
            return False
        for i, patch in enumerate(self._patches, 1):
            if not advance_run(patch, run):
                return False
            if self._fresh[i] and not self._proven(i, run):
                return False
        return True

    def _proven(self, i: int, run: TensorRun) -> bool:
        """Those that may differ from the step before have both digests of step ``i``."""
        before, stated = (rows_of(run, digests) for digests in self._digests[i - 1 : i + 1])
        names = self._patches[i - 1].names
        held = np.array([tensor.name in names for tensor in run.tensors], bool)
        which = np.flatnonzero(
            held | (before.sums != stated.sums).any(axis=1) | (before.xxh3 != stated.xxh3).any(axis=1)
        )
        if kernels.LIB is None:
            words = [run.bytes_of(n).view(uint(run.widths[n])) for n in which.tolist()]
            sums = np.array([state_digest.of_run(w) for w in words], np.uint64).reshape(-1, 2)
        else:
            (at, sizes), widths = run.places[which].T, run.widths[which]
            sums = kernels.digest_many(np.array([at, sizes // widths, widths]).T)
        same = (hash_run(run)[which] == stated.xxh3[which]).all(axis=1) | (stated.xxh3[which] == 0).all(axis=1)
        return bool(same.all() and (sums == stated.sums[which]).all())

    def check(self, name: str) -> None:
        """One tensor in all steps. Raises ChainError ``tensor-shape``, ``tensor-differs``, and for broken patches."""
        for i, (data, known) in enumerate(self._replay.history(name)):
            want = self._layouts[i].tensors.get(name)
            where = f"step {self._steps[i].step}, {name[:200]}"
            if known != ((want.dtype, want.shape) if want else None):
                need = describe((want.dtype, want.shape) if want else None)
                raise ChainError("tensor-shape", where=where, have=describe(known), need=need)
            if i and self._fresh[i] and want and data is not None and self._may_differ(name, i):
                have = state_digest.of_tensor(data, DTYPES[want.dtype])
                stated = self._digests[i][name]
                if have.sums != stated.sums or stated.xxh3 not in (have.xxh3, UNSTATED):
                    tensor_differs(where, "other bytes", "those of the step's digests")

    def _may_differ(self, name: str, i: int) -> bool:
        """Proven by the step before, where neither the bytes nor the digests changed."""
        return name in self._patches[i - 1].names or self._digests[i - 1].get(name) != self._digests[i][name]
