"""A checkpoint directory against a step: every file, every header, every tensor."""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack
from pathlib import Path

from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import ChainError
from deltackpt.format.manifest import File
from deltackpt.repository import Repository
from deltackpt.util.disk import open_regular
from deltackpt.util.parallel import threads_or_default
from deltackpt.util.progress import SILENT, Progress
from deltackpt.verification.findings import Findings, VerifyReport
from deltackpt.verification.tensor import check_stored


def verify_checkpoint(
    path: str | os.PathLike[str],
    repo: Repository,
    step: str | int = "latest",
    *,
    ref: str = "main",
    threads: int | None = None,
    progress: Progress = SILENT,
) -> VerifyReport:
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
            check_stored(found, layout.tensors[name], name, digests, os.fspath(path))
            progress.advance(layout.tensors[name].end - layout.tensors[name].start)

        findings.each("tensors", tensor, layout.tensors, threads_or_default(threads))
        known = {*(s.path for s in layout.shards), *(s.path for s in layout.side)}
        passed_over = {path for path, _ in found.left_out} - known
        strays = {path for path in passed_over if path.endswith(".safetensors")}  # which loaders take in
        if passed_over - strays:
            findings.checked["other files passed over"] = len(passed_over - strays)
        for extra in sorted(({*(s.path for s in found.shards), *found.side} - known) | strays):
            have = "a file that the step does not have"
            findings.add(ChainError("file-unknown", where=root / extra, have=have, need="the step's files alone"))
    return findings.report()


def _check_header(found: Checkpoint, path: str, text: bytes) -> None:
    have = next((s.header.text for s in found.shards if s.path == path), None)
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
