"""The edge: the immutable record of another way to a step that exists (FORMAT section "Edge").

A fold leads from one step of a chain to a later one, and stands for all patches between; an anchor that was written
later leads from nowhere. Canonical JSON; the object's name holds the step that it leads to and the sha256 of its bytes.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from deltackpt.errors import FormatError
from deltackpt.format.canonical import dumps, loads_canonical
from deltackpt.format.manifest import Fields, File, Link

FORMAT = "deltackpt-edge"
VERSION = 1
MAX_EDGE = 4 << 20

NAME = re.compile(r"edges/(\d{8,16})-([0-9a-f]{64})\.json")
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
        return f"edges/{self.end.step:08d}-{hashlib.sha256(self.encode()).hexdigest()}.json"


def decode(data: bytes, where: str) -> Edge:
    """Parse and check an edge. Raises FormatError: json-*, version-unknown, manifest-canonical, manifest-field."""
    value, canonical = loads_canonical(data, limit=MAX_EDGE, where=where)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        need = f'an object of format "{FORMAT}"'
        raise FormatError("manifest-field", where=where, have="another kind of JSON", need=need)
    if type(value.get("version")) is not int or value["version"] != VERSION:
        have = f"version {value.get('version')!r}"
        raise FormatError("version-unknown", where=where, have=have, need=f"edge version {VERSION}")
    if not canonical:
        raise FormatError("manifest-canonical", where=where, have="JSON in another form", need="canonical JSON")
    f = Fields(value, where)
    if value.keys() != _KEYS:
        f.refuse("edge", repr(sorted(value))[:80], ", ".join(sorted(_KEYS)))
    end, files = f.link("to"), f.files("files")
    if end is None or files is None:
        f.refuse("to", "no step, or no files", "both")
    start = f.link("from")
    if start is not None and start.step >= end.step:
        f.refuse("from", f"step {start.step}", f"one before {end.step}")
    folder = "folds/" if start else "anchors/"
    if not all(file.name.startswith(folder) for file in files):
        f.refuse("files", "a file elsewhere", f"files in {folder}")
    return Edge(f.text("repository", _ID), start, end, files, f.text("producer"), f.number("time", 1 << 53))
