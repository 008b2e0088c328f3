"""Every manifest, edge, object and chain of a repository, and every step's state."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from deltackpt.errors import ChainError, DeltackptError, FormatError, NotFoundError
from deltackpt.format import pack
from deltackpt.format.edge import Edge
from deltackpt.format.manifest import File, Link, Manifest
from deltackpt.format.pack import FOLDER, MAX_PACK, PackName, packs_of
from deltackpt.format.signature import KeySet
from deltackpt.repository import Ref, Repository
from deltackpt.repository.chain import check_parent
from deltackpt.repository.edges import StoredEdges, record_of
from deltackpt.repository.leases import lease, read_leases
from deltackpt.store.base import GONE
from deltackpt.util.parallel import ordered_map, threads_or_default
from deltackpt.util.progress import SILENT, Progress
from deltackpt.verification.findings import Findings, VerifyReport
from deltackpt.verification.states import Checks, check_states

STREAMS = 4  # objects of a remote store that are read at a time
SPARE = "Nothing needs a pack: it may be removed, and `deltackpt compact` makes others."


def verify_repository(repo: Repository, *, threads: int | None = None, progress: Progress = SILENT) -> VerifyReport:
    """Every manifest, edge, object and chain, and every step's state, rebuilt along every way and proven by both
    digests.

    A parent that is gone is the beginning of history, where its child has another way. No gc removes a step meanwhile,
    unless the store is read-only.
    """
    with lease(repo, None) as held:
        # A lease on every step may be of a mirror, which puts the refs last, or was killed before: no ref is lost then.
        mirroring = any(other.link is None and other.name != (held and held.name) for other in read_leases(repo))
        return _verify(repo, mirroring, threads_or_default(threads), progress)


def _verify(repo: Repository, mirroring: bool, threads: int, progress: Progress) -> VerifyReport:
    findings, steps = Findings(repo.store.url), {}
    links = list(repo.steps())
    for link in links:
        if (found := findings.attempt("manifests", repo.load, link)) is not None:
            steps[link.id] = found
    stored = StoredEdges(repo.store, repo.id)  # from no pack: each object itself is checked
    edges = [edge for name in stored.names if (edge := findings.attempt("edges", stored.load, name)) is not None]
    # [S-EDGE-3]: an edge whose steps are gone leads nowhere, and gc removes it.
    edges = [e for e in edges if e.end.id in steps and (e.start is None or e.start.id in steps)]
    for read, names in ((repo.ref, repo.ref_names()), (repo.tag, repo.ref_names("tags/"))):
        for name in names:
            findings.attempt("refs", _check_ref, repo, read, name, steps)
    if not mirroring and not any(repo.ref_names()):
        findings.attempt("refs", repo.head)
    if repo.trust is not None:
        keys: KeySet | None = None
        for name in sorted(info.name for info in repo.store.list("keys/")):
            keys = findings.attempt("key sets", repo.trust.check_key_set, name, keys)
        for link in links:
            findings.attempt("signatures", repo.trust.check_step, link)
        for edge in edges:
            findings.attempt("signatures", repo.trust.check_step, record_of(edge.name))
    rooted = {edge.end.id for edge in edges} | {id_ for id_, m in steps.items() if m.anchor is not None}
    for id_, m in steps.items():
        if m.parent is None or (m.parent.id not in steps and id_ in rooted):
            continue
        if findings.attempt("links", _check_link, repo, m.parent, steps):
            findings.attempt("links", check_parent, m, steps[m.parent.id])
    for one in packs_of(info.name for info in repo.store.list(FOLDER)):
        findings.attempt("packs", _check_pack, repo, one)
    intact, whole = _check_objects(repo, findings, steps, edges, threads, progress)
    checks = Checks(repo, findings, intact, threads)
    check_states(checks, whole)
    if lost := len({link.id for link in links} - checks.reached):
        findings.checked["steps that cannot be restored"] = lost
    return findings.report()


def _check_ref(repo: Repository, read: Callable[[str], Ref | None], name: str, steps: Mapping[str, Manifest]) -> None:
    if (ref := read(name)) is not None:
        _check_link(repo, ref.link, steps)
        if steps[ref.link.id].step != ref.link.step:  # [S-NAME-6]: its manifest has another name
            raise _no_manifest(repo, ref.link)


def _check_pack(repo: Repository, name: PackName) -> bool:
    where = f"{repo.store.url}/{name.name}"
    try:
        raw = repo.store.get(name.name, MAX_PACK)
    except NotFoundError:  # removed meanwhile, as packs may be
        return True
    if hashlib.sha256(raw).hexdigest() != name.sha256:  # [F-LINE-4]
        raise FormatError("manifest-hash", where=where, have="other bytes", need=f"sha256 {name.sha256}", hint=SPARE)
    records = pack.decode(raw, where)
    pack.check_name(records, name, where)
    if records[0].repository != repo.id:  # [F-LINE-3]
        have, need = f"records of repository {records[0].repository}", f"those of {repo.id}"
        raise ChainError("manifest-elsewhere", where=where, have=have, need=need, hint=SPARE)
    return True


def _check_link(repo: Repository, link: Link, steps: Mapping[str, Manifest]) -> bool:
    if link.id not in steps:  # [S-REF-4], [S-INV-3]
        raise _no_manifest(repo, link)
    return True


def _no_manifest(repo: Repository, link: Link) -> NotFoundError:
    where, need = f"{repo.store.url}/{link.name}", f"the manifest of step {link.step}"
    return NotFoundError("step-missing", where=where, have="no such manifest", need=need, hint=GONE)


def _check_objects(
    repo: Repository,
    findings: Findings,
    steps: Mapping[str, Manifest],
    edges: Sequence[Edge],
    threads: int,
    progress: Progress,
) -> tuple[dict[str, Manifest], list[Edge]]:
    """Hash every object that is named. -> the steps and the edges whose objects are all as they should be."""
    hashed: dict[File, bool] = {}
    named = {f for m in steps.values() for f in m.files} | {f for edge in edges for f in edge.files}
    progress.start("verify", sum(f.size for f in named))
    errors = _hash_all(repo, named, threads, progress)

    def intact(file: File) -> bool:
        if file not in hashed:
            hashed[file] = bool(findings.attempt("objects", _proven, repo, file, errors))
            if file not in errors:  # a side file: layouts alone name them
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


def _hash_all(
    repo: Repository, files: Iterable[File], threads: int, progress: Progress
) -> dict[File, DeltackptError | None]:
    """Read and hash objects, several at a time. -> what is wrong with each."""

    def prove(file: File) -> tuple[File, DeltackptError | None]:
        try:
            repo.prove([file])
        except DeltackptError as error:
            return file, error
        return file, None

    found: dict[File, DeltackptError | None] = {}
    at_once = threads if repo.store.capabilities.local else min(threads, STREAMS)
    # The largest first: one that began last would be read alone.
    for file, error in ordered_map(prove, sorted(files, key=lambda f: (-f.size, f.name)), at_once):
        found[file] = error
        progress.advance(file.size)
    return found


def _proven(repo: Repository, file: File, errors: Mapping[File, DeltackptError | None]) -> bool:
    if file not in errors:
        repo.prove([file])
    elif (error := errors[file]) is not None:
        raise error
    return True
