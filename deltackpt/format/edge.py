"""The edge: the immutable record of another way to a step that exists (FORMAT section "Edge").

A fold leads from one step of a chain to a later one, and stands for all patches between; an anchor that was written
later leads from nowhere. Canonical JSON; the object's name holds the step that it leads to and the sha256 of its bytes.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from deltackpt.format.canonical import dumps, loads_canonical
from deltackpt.format.manifest import Fields, File, Link
from deltackpt.format.record import RecordKind, check_canonical

FORMAT = "deltackpt-edge"
VERSION = 1
MAX_EDGE = 4 << 20

NAME = re.compile(r"edges/(\d{8,16})-([0-9a-f]{64})\.json")
_KIND = RecordKind(FORMAT, VERSION, "edge")
_KEYS = {"format", "version", "repository", "from", "to", "files", "producer", "time"}
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Edge:
    """Fields in the order of the spec. ``start`` is the record's `from`: None for an anchor, whose ``files`` are those
    of the layout's shards, in their order; the files of a fold are parts."""

    repository: str
    start: Link | None
    end: Link
    files: tuple[File, ...]
    producer: str
    time: int  # seconds since 1970

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(f.size for f in self.files)

    def encode(self) -> bytes:
        """The record's bytes: canonical JSON."""
        return dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "repository": self.repository,
                "from": self.start.to_dict() if self.start else None,
                "to": self.end.to_dict(),
                "files": [f.to_dict() for f in self.files],
                "producer": self.producer,
                "time": self.time,
            }
        )

    @property
    def name(self) -> str:
        """The record's object."""
        return f"edges/{self.end.step:08d}-{hashlib.sha256(self.encode()).hexdigest()}.json"


def decode(data: bytes, where: str) -> Edge:
    """Parse and check an edge. Raises FormatError: json-*, version-unknown, manifest-canonical, manifest-field."""
    value, canonical = loads_canonical(data, limit=MAX_EDGE, where=where)
    f = Fields(_KIND.check(value, where), where)
    check_canonical(canonical, where)
    if value.keys() != _KEYS:  # [F-EDGE-1]
        f.refuse("edge", repr(sorted(value))[:80], ", ".join(sorted(_KEYS)))
    end, files = f.link("to"), f.files("files")
    if end is None or files is None:
        f.refuse("to", "no step, or no files", "both")
    start = f.link("from")
    if start is not None and start.step >= end.step:  # [F-EDGE-2]
        f.refuse("from", f"step {start.step}", f"one before {end.step}")
    folder = "folds/" if start else "anchors/"
    if not all(file.name.startswith(folder) for file in files):  # [F-EDGE-3]
        f.refuse("files", "a file elsewhere", f"files in {folder}")
    return Edge(f.text("repository", _ID), start, end, files, f.text("producer"), f.number("time", 1 << 53))
