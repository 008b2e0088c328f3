"""Check everything that can be checked, and report all of it: a repository, one part, or a checkpoint directory."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from deltackpt import digest
from deltackpt.bits import DTYPES
from deltackpt.chain import Hop, check_parent
from deltackpt.checkpoint import Checkpoint
from deltackpt.diff import State, Tensor
from deltackpt.digest import TensorDigest
from deltackpt.disk import open_regular
from deltackpt.errors import ChainError, DeltackptError, NotFoundError
from deltackpt.format.digests import UNSTATED, proves
from deltackpt.format.edge import Edge
from deltackpt.format.manifest import File, Link, Manifest
from deltackpt.leases import lease
from deltackpt.parallel import ordered_map, threads_or_default
from deltackpt.parts import PatchReader
from deltackpt.patch import PartReader
from deltackpt.progress import SILENT, Progress
from deltackpt.replay import Anchor, Replay, describe
from deltackpt.repository import Repository

T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, in the words of the error that a reader would have met."""

    code: str
    exit_code: int
    where: str
    have: str
    need: str
    hint: str

    @classmethod
    def of(cls, error: DeltackptError) -> Finding:
        return cls(error.code, error.exit_code, error.where, error.have, error.need, error.hint)


@dataclass(frozen=True)
class Report:
    """What was checked, by kind, and what was found."""

    target: str
    checked: dict[str, int]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def exit_code(self) -> int:
        """0, or the lowest exit code found: bad bytes come before a chain that does not fit, and so on."""
        return min((f.exit_code for f in self.findings), default=0)

    def to_dict(self) -> dict[str, Any]:
        findings = [asdict(f) for f in self.findings]
        return {"target": self.target, "ok": self.ok, "checked": dict(self.checked), "findings": findings}


@dataclass
class Findings:
    """Collects; no check stops at the first error."""

    target: str
    checked: Counter[str] = field(default_factory=Counter)
    found: dict[Finding, None] = field(default_factory=dict)

    def add(self, error: DeltackptError) -> None:
        self.found[Finding.of(error)] = None

    def attempt(self, kind: str, work: Callable[..., T], *arguments: Any) -> T | None:
        """Count one check. An error of ours becomes a finding and None."""
        self.checked[kind] += 1
        try:
            return work(*arguments)
        except DeltackptError as error:
            self.add(error)
            return None

    def each(self, kind: str, work: Callable[[T], None], items: Iterable[T], threads: int) -> None:
        """The same for many, over threads."""

        def one(item: T) -> DeltackptError | None:
            try:
                work(item)
            except DeltackptError as error:
                return error
            return None

        for error in ordered_map(one, items, threads):
            self.checked[kind] += 1
            if error is not None:
                self.add(error)

    def report(self) -> Report:
        return Report(self.target, dict(self.checked), tuple(self.found))


def verify_part(path: str | os.PathLike[str]) -> Report:
    """One part by itself: header, table, and the checksums of the table. Values need the old tensors."""
    findings = Findings(os.fspath(path))

    def read() -> PartReader:
        try:
            return PartReader(memoryview(Path(path).read_bytes()), os.fspath(path))
        except OSError as error:
            raise NotFoundError("part-missing", where=path, have=error.strerror or error, need="a part") from error

    if (part := findings.attempt("parts", read)) is not None:
        for entry in part.entries:
            findings.attempt("tensors", part.check, entry)
    return findings.report()


def verify_checkpoint(
    path: str | os.PathLike[str],
    repo: Repository,
    step: str | int = "latest",
    *,
    ref: str = "main",
    threads: int | None = None,
    progress: Progress = SILENT,
) -> Report:
    """A checkpoint directory against a step: every file, every header, every tensor by its xxh3."""
    findings, root = Findings(os.fspath(path)), Path(path)
    target = repo.load(repo.find(step, ref))
    layout, digests = repo.layout(target), repo.digests(target)
    with ExitStack() as stack:
        found = findings.attempt("checkpoints", lambda: stack.enter_context(Checkpoint.open(path)))
        if found is None:
            return findings.report()
        for shard in layout.shards:
            findings.attempt("files", _check_header, found, shard.path, shard.header.text)
        for side in layout.side:
            findings.attempt("files", _check_file, root / side.path, side.file)
        progress.start("verify", sum(t.end - t.start for t in layout.tensors.values()))

        def tensor(name: str) -> None:
            _check_tensor(found, layout.tensors[name], name, digests, os.fspath(path))
            progress.advance(layout.tensors[name].end - layout.tensors[name].start)

        findings.each("tensors", tensor, layout.tensors, threads_or_default(threads))
        known = {*(s.path for s in layout.shards), *(s.path for s in layout.side)}
        for extra in sorted({*(s.name for s in found.shards), *found.side} - known):
            have = "a file that the step does not have"
            findings.add(ChainError("file-unknown", where=root / extra, have=have, need="the step's files alone"))
    return findings.report()


def _check_header(found: Checkpoint, path: str, text: bytes) -> None:
    have = next((s.header.text for s in found.shards if s.name == path), None)
    if have != text:
        what = "no such shard" if have is None else "another header"
        raise ChainError("file-differs", where=found.root / path, have=what, need="the header of the step")


def _check_file(path: Path, file: File) -> None:
    try:
        with os.fdopen(open_regular(path), "rb") as found:
            size = os.fstat(found.fileno()).st_size
            if size != file.size:
                raise ChainError("file-differs", where=path, have=f"{size:,} bytes", need=f"{file.size:,} bytes")
            data = found.read(size)
    except OSError as error:
        have = error.strerror or error
        raise ChainError("file-differs", where=path, have=have, need=f"{file.size:,} bytes") from error
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise ChainError("file-differs", where=path, have="other bytes", need=f"sha256 {file.sha256[:16]}…")


def _check_tensor(state: State, want: Tensor, name: str, digests: Mapping[str, TensorDigest], where: str) -> None:
    have, need = state.tensors.get(name), (want.dtype, want.shape)
    if have is None or (have.dtype, have.shape) != need:
        shown = describe((have.dtype, have.shape) if have else None)
        raise ChainError("tensor-shape", where=f"{where}, {name[:200]}", have=shown, need=describe(need))
    data = state.bytes_of(name)
    same = proves(data, want.dtype, digests[name])
    found = "" if same else digest.xxh3(data).hex()
    state.release(name)
    if not same:
        _differs(f"{where}, {name[:200]}", f"xxh3 {found}", f"the step's digest, {digests[name]}")


def _differs(where: str, have: str, need: str) -> None:
    raise ChainError("tensor-differs", where=where, have=have, need=need)


def verify_repository(repo: Repository, *, threads: int | None = None, progress: Progress = SILENT) -> Report:
    """Every manifest, edge, object and chain, and every step's state, rebuilt along every way and proven by both
    digests.

    A parent that is gone is the beginning of history, where its child has another way. No gc removes a step meanwhile,
    unless the store is read-only.
    """
    with lease(repo, None):
        return _verify(repo, threads_or_default(threads), progress)


def _verify(repo: Repository, threads: int, progress: Progress) -> Report:
    findings, steps = Findings(repo.store.url), {}
    for link in repo.steps():
        if (found := findings.attempt("manifests", repo.load, link)) is not None:
            steps[link.id] = found
    stored = repo.edges()
    edges = [edge for name in stored.names if (edge := findings.attempt("edges", stored.load, name)) is not None]
    # An edge whose steps are gone leads nowhere: gc removes it.
    edges = [e for e in edges if e.end.id in steps and (e.start is None or e.start.id in steps)]
    for ref in (*repo.refs(), *repo.refs("tags/")):
        findings.attempt("refs", _check_link, repo, ref.link, steps)
    rooted = {edge.end.id for edge in edges} | {id_ for id_, m in steps.items() if m.anchor is not None}
    for id_, m in steps.items():
        if m.parent is None or (m.parent.id not in steps and id_ in rooted):
            continue
        if findings.attempt("links", _check_link, repo, m.parent, steps):
            findings.attempt("links", check_parent, m, steps[m.parent.id])
    intact, whole = _check_objects(repo, findings, steps, edges, progress)
    _check_states(_Checks(repo, findings, intact, threads), whole)
    for id_ in steps:
        if id_ not in intact:
            findings.checked["steps that cannot be restored"] += 1
    return findings.report()


def _check_link(repo: Repository, link: Link, steps: Mapping[str, Manifest]) -> bool:
    if link.id not in steps:
        where, need = f"{repo.store.url}/{link.name}", f"the manifest of step {link.step}"
        raise NotFoundError("step-missing", where=where, have="no such manifest", need=need)
    return True


def _check_objects(
    repo: Repository, findings: Findings, steps: Mapping[str, Manifest], edges: Sequence[Edge], progress: Progress
) -> tuple[dict[str, Manifest], list[Edge]]:
    """Hash every object that is named. -> the steps and the edges whose objects are all as they should be."""
    hashed: dict[File, bool] = {}
    named = {f for m in steps.values() for f in m.files} | {f for edge in edges for f in edge.files}
    progress.start("verify", sum(f.size for f in named))

    def intact(file: File) -> bool:
        if file not in hashed:
            hashed[file] = bool(findings.attempt("objects", _hash, repo, file))
            progress.advance(file.size)
        return hashed[file]

    good = {}
    for id_, m in steps.items():
        fine = all(list(map(intact, m.files)))  # all of them, also after the first bad one
        if hashed[m.layout] and (layout := findings.attempt("layouts", repo.layout, m)) is not None:
            fine = min([fine, *(intact(side.file) for side in layout.side)])
            if fine and findings.attempt("digests", repo.digests, m) is not None:
                good[id_] = m
    return good, [edge for edge in edges if all(list(map(intact, edge.files)))]


def _hash(repo: Repository, file: File) -> bool:
    for _ in repo.stream(file):
        pass
    return True


@dataclass
class _Checks:
    """What is checked, and the steps whose states were proven so far."""

    repo: Repository
    findings: Findings
    steps: Mapping[str, Manifest]
    threads: int
    reached: set[str] = field(default_factory=set)
    children: dict[str, list[Manifest]] = field(default_factory=dict)


Run = list[tuple[Manifest, Hop | None]]  # steps in order, each with the hop that leads to it


def _check_states(checks: _Checks, edges: Sequence[Edge]) -> None:
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
        digests, where = checks.repo.digests(step), f"anchor of step {step.step}"
        check = lambda name, s=state, d=digests, w=where: _check_tensor(s, s.tensors[name], name, d, w)  # noqa: E731
        checks.findings.each("tensors", check, state.tensors, checks.threads)
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


def _check_heads(repo: Repository, step: Manifest, files: Sequence[File]) -> None:
    """Readers go by the headers of the layout; who loads an anchor without deltackpt goes by its own."""
    for file, shard in zip(files, repo.layout(step).shards, strict=True):
        if repo.store.get_range(file.name, 0, shard.header.data_start) != shard.header.head:
            where = f"{repo.store.url}/{file.name}"
            raise ChainError("anchor-files", where=where, have="another header", need="the header of the layout")


def _check_fold(checks: _Checks, edge: Edge, start: Link) -> None:
    """Rebuild the step where a fold begins, apply it, and go on from there if nothing else led there."""
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


def _check_runs(checks: _Checks, begin: Run, state: State, anew: set[str]) -> None:
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


def _check_run(checks: _Checks, run: Run, state: State, anew: set[str]) -> None:
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

        def history(name: str) -> None:
            for i, (data, known) in enumerate(Replay(state, patches, layouts[0]).history(name)):
                want = layouts[i].tensors.get(name)
                if known != ((want.dtype, want.shape) if want else None):
                    need = describe((want.dtype, want.shape) if want else None)
                    where = f"step {steps[i].step}, {name[:200]}"
                    raise ChainError("tensor-shape", where=where, have=describe(known), need=need)
                if i and fresh[i] and want and data is not None and _may_differ(name, i, patches, digests):
                    have = digest.of_tensor(data, DTYPES[want.dtype])
                    stated = digests[i][name]
                    if have.sums != stated.sums or stated.xxh3 not in (have.xxh3, UNSTATED):
                        _differs(f"step {steps[i].step}, {name[:200]}", "other bytes", "those of the step's digests")

        names = sorted({name for layout in layouts for name in layout.tensors}, key=str.encode)
        findings.each("tensors", history, names, checks.threads)
        checks.reached.update(ids)


def _may_differ(name: str, i: int, patches: list[PatchReader], digests: list[dict[str, TensorDigest]]) -> bool:
    """Proven by the step before, where neither the bytes nor the digests changed."""
    return bool(patches[i - 1].entries_of(name)) or digests[i - 1].get(name) != digests[i][name]
