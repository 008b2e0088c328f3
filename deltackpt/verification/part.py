"""One part by itself, without the old tensors."""

from __future__ import annotations

import os
from pathlib import Path

from deltackpt.errors import NotFoundError
from deltackpt.patch.part import PartReader
from deltackpt.verification.findings import Findings, VerifyReport


def verify_part(path: str | os.PathLike[str]) -> VerifyReport:
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
