"""Check everything that can be checked, and report all of it: a repository, one part, or a checkpoint directory."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from deltackpt import digest
from deltackpt.bits import DTYPES
from deltackpt.chain import check_parent
from deltackpt.checkpoint import Checkpoint
from deltackpt.diff import State, Tensor
from deltackpt.digest import TensorDigest
from deltackpt.errors import ChainError, DeltackptError, NotFoundError
from deltackpt.format.manifest import File, Link, Manifest
from deltackpt.parallel import ordered_map, threads_or_default
from deltackpt.parts import PatchReader
from deltackpt.patch import PartReader
from deltackpt.progress import SILENT, Progress
from deltackpt.replay import Anchor, Replay, describe
from deltackpt.repository import Repository, object_differs

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
        data = path.read_bytes()
    except OSError as error:
        raise ChainError("file-differs", where=path, have=error.strerror or error, need=f"{file.size:,} bytes") from error
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise ChainError("file-differs", where=path, have="other bytes", need=f"sha256 {file.sha256[:16]}…")


def _check_tensor(state: State, want: Tensor, name: str, digests: Mapping[str, TensorDigest], where: str) -> None:
    have, need = state.tensors.get(name), (want.dtype, want.shape)
    if have is None or (have.dtype, have.shape) != need:
        shown = describe((have.dtype, have.shape) if have else None)
        raise ChainError("tensor-shape", where=f"{where}, {name[:200]}", have=shown, need=describe(need))
    found = digest.xxh3(state.bytes_of(name)).hex()
    state.release(name)
    if found != digests[name].xxh3.hex():
        _differs(f"{where}, {name[:200]}", f"xxh3 {found}", f"xxh3 {digests[name].xxh3.hex()}")


def _differs(where: str, have: str, need: str) -> None:
    raise ChainError("tensor-differs", where=where, have=have, need=need)


def verify_repository(repo: Repository, *, threads: int | None = None, progress: Progress = SILENT) -> Report:
    """Every manifest, object and chain, and every step's state, rebuilt and proven by both digests."""
    findings, steps = Findings(repo.store.url), {}
    for link in repo.steps():
        if (found := findings.attempt("manifests", repo.load, link)) is not None:
            steps[link.id] = found
    for ref in (*repo.refs(), *repo.refs("tags/")):
        findings.attempt("refs", _check_link, repo, ref.link, steps)
    for m in steps.values():
        if m.parent is not None and findings.attempt("links", _check_link, repo, m.parent, steps):
            findings.attempt("links", check_parent, m, steps[m.parent.id])
    intact = _check_objects(repo, findings, steps, progress)
    _check_states(repo, findings, intact, threads_or_default(threads))
    for id_, m in steps.items():
        if id_ not in intact:
            findings.checked["steps that cannot be restored"] += 1
    return findings.report()


def _check_link(repo: Repository, link: Link, steps: Mapping[str, Manifest]) -> bool:
    if link.id not in steps:
        where, need = f"{repo.store.url}/{link.name}", f"the manifest of step {link.step}"
        raise NotFoundError("step-missing", where=where, have="no such manifest", need=need)
    return True


def _check_objects(
    repo: Repository, findings: Findings, steps: Mapping[str, Manifest], progress: Progress
) -> dict[str, Manifest]:
    """Hash every object that a manifest names. -> the steps whose objects are all as they should be."""
    hashed: dict[File, bool] = {}
    progress.start("verify", sum(f.size for f in {f for m in steps.values() for f in m.files}))

    def intact(file: File) -> bool:
        if file not in hashed:
            hashed[file] = bool(findings.attempt("objects", _hash, repo, file))
            progress.advance(file.size)
        return hashed[file]

    good = {}
    for id_, m in steps.items():
        fine = all([intact(file) for file in m.files])
        if hashed[m.layout] and (layout := findings.attempt("layouts", repo.layout, m)) is not None:
            fine = all([intact(side.file) for side in layout.side]) and fine
            if fine and findings.attempt("digests", repo.digests, m) is not None:
                good[id_] = m
    return good


def _hash(repo: Repository, file: File) -> bool:
    found, size = hashlib.sha256(), 0
    for chunk in repo.store.read(file.name):
        found.update(chunk)
        size += len(chunk)
    if size != file.size or found.hexdigest() != file.sha256:
        raise object_differs(f"{repo.store.url}/{file.name}", size, file)
    return True


def _check_states(repo: Repository, findings: Findings, steps: Mapping[str, Manifest], threads: int) -> None:
    """Rebuild and prove every step: an anchor by itself, the others along the patches from an anchor."""
    children: dict[str, list[Manifest]] = {}
    for m in steps.values():
        if m.patch is not None and m.parent is not None:
            children.setdefault(m.parent.id, []).append(m)
    reached: set[str] = set()
    for id_, anchor in sorted(steps.items(), key=lambda item: item[1].step):
        state = findings.attempt("anchors", Anchor, repo, anchor) if anchor.anchor is not None else None
        if state is None:
            continue
        digests, where = repo.digests(anchor), f"anchor of step {anchor.step}"
        check = lambda name, s=state, d=digests, w=where: _check_tensor(s, s.tensors[name], name, d, w)  # noqa: E731
        findings.each("tensors", check, state.tensors, threads)
        pending = [[anchor]] if id_ not in reached else []  # a chain that passes through it has been here already
        while pending:
            run = _extend(pending.pop(), children)
            _check_run(repo, findings, run, reached, state, threads)
            pending += [[*run, child] for child in children.get(run[-1].link.id, [])]
    for id_, m in steps.items():
        if id_ not in reached:
            have = "no intact way from an anchor"
            findings.add(ChainError("chain-broken", where=f"step {m.step}", have=have, need="an unbroken chain"))


def _extend(run: list[Manifest], children: Mapping[str, list[Manifest]]) -> list[Manifest]:
    """A chain, as far as it does not fork."""
    run = list(run)
    while len(following := children.get(run[-1].link.id, [])) == 1:
        run.append(following[0])
    return run


def _check_run(
    repo: Repository, findings: Findings, run: list[Manifest], reached: set[str], state: State, threads: int
) -> None:
    """Apply the patches of a chain one by one; prove every tensor of every step that was not reached before."""
    with ExitStack() as stack:
        patches: list[PatchReader] = []
        for m in run[1:]:
            opened = findings.attempt("patches", lambda m=m: stack.enter_context(PatchReader.open(repo, m)))
            if opened is None:
                break
            patches.append(opened)
        layouts = [repo.layout(m) for m in run[: len(patches) + 1]]
        digests = [repo.digests(m) for m in run[: len(patches) + 1]]
        fresh = [m.link.id not in reached for m in run]

        def history(name: str) -> None:
            for i, (data, known) in enumerate(Replay(state, patches, layouts[0]).history(name)):
                want = layouts[i].tensors.get(name)
                if known != ((want.dtype, want.shape) if want else None):
                    need = describe((want.dtype, want.shape) if want else None)
                    where = f"step {run[i].step}, {name[:200]}"
                    raise ChainError("tensor-shape", where=where, have=describe(known), need=need)
                if i and fresh[i] and want and data is not None and _may_differ(name, i, patches, digests):
                    have = digest.of_tensor(data, DTYPES[want.dtype])
                    if have != digests[i][name]:
                        _differs(f"step {run[i].step}, {name[:200]}", "other bytes", "those of the step's digests")

        names = sorted({name for layout in layouts for name in layout.tensors}, key=str.encode)
        findings.each("tensors", history, names, threads)
        reached.update(m.link.id for m in run[: len(patches) + 1])


def _may_differ(name: str, i: int, patches: list[PatchReader], digests: list[dict[str, TensorDigest]]) -> bool:
    """Proven by the step before, where neither the bytes nor the digests changed."""
    return bool(patches[i - 1].entries_of(name)) or digests[i - 1].get(name) != digests[i][name]
