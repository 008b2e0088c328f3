"""The pack: records of neighboring steps in one object, each line the bytes of a manifest or an edge (FORMAT section
"Pack").

Nothing rests on a pack: a record is found in it by the sha256 of its line, which is what its own name says.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn

from deltackpt.errors import FormatError
from deltackpt.format import edge, manifest
from deltackpt.format.canonical import loads_strict
from deltackpt.format.edge import Edge
from deltackpt.format.manifest import Manifest

FOLDER = "packs/"
MAX_PACK = 16 << 20
MANY = 1000  # lines that are looked at one by one, however short they are
SHORTEST = 210  # bytes of an edge with as little in it as may be, less a few

_NAME = re.compile(r"packs/(\d{8,16})-(\d{8,16})-([1-9]\d{0,5})-([0-9a-f]{64})\.jsonl")
_STEP_OF = re.compile(r"(?:steps|edges)/(\d{8,16})-([0-9a-f]{64})\.json")


@dataclass(frozen=True)
class PackName:
    """What the name of a pack says: ``records`` records of the steps ``first`` to ``last``, and the sha256 of all."""

    first: int
    last: int
    records: int
    sha256: str

    @property
    def name(self) -> str:
        """The pack's object."""
        return f"{FOLDER}{self.first:08d}-{self.last:08d}-{self.records}-{self.sha256}.jsonl"

    @classmethod
    def parse(cls, name: str) -> PackName | None:
        """The same, None for an object that has no such name."""
        found = _NAME.fullmatch(name)
        made = found and cls(int(found[1]), int(found[2]), int(found[3]), found[4])
        return made if made and made.name == name and made.first <= made.last else None


def packs_of(names: Iterable[str]) -> list[PackName]:
    """The packs among the names of objects."""
    return [found for name in names if name.startswith(FOLDER) and (found := PackName.parse(name)) is not None]


def record_of(name: str) -> tuple[int, str] | None:
    """Step and sha256 of a record by the name of its own object; None for any other name."""
    found = _STEP_OF.fullmatch(name)
    return (int(found[1]), found[2]) if found else None


def encode(records: Sequence[tuple[int, bytes]]) -> tuple[PackName, bytes]:
    """A pack of records, each with its step, in any order; -> its name and its bytes."""
    lines = sorted((step, hashlib.sha256(raw).hexdigest(), raw) for step, raw in records)
    data = b"".join(raw + b"\n" for *_, raw in lines)  # [F-LINE-1] [F-LINE-2]
    return PackName(lines[0][0], lines[-1][0], len(lines), hashlib.sha256(data).hexdigest()), data


def lines(data: bytes) -> dict[str, bytes]:
    """Every line of an object that should be a pack, by its sha256 in hex, which a reader of a record knows
    ([F-LINE-5]). Nothing else is checked, and nothing refused."""
    found, start = {}, 0
    while (end := data.find(b"\n", start)) >= 0:
        if end - start >= SHORTEST:  # [F-READ-2]: memory is that of records, not of line feeds
            line = data[start:end]
            found[hashlib.sha256(line).hexdigest()] = line
        start = end + 1
    return found


def decode(data: bytes, where: str) -> list[Manifest | Edge]:
    """Parse and check a whole pack, as only a check of the repository has to.

    Raises FormatError: object-too-large, ``pack-field``, and what `manifest.decode` and `edge.decode` raise.
    """
    if len(data) > MAX_PACK:  # [F-LINE-1]
        raise FormatError("object-too-large", where=where, have=f"{len(data)} bytes", need=f"at most {MAX_PACK}")
    if data.count(b"\n") > MANY + len(data) // SHORTEST:  # [F-READ-2]: before there is an object for each
        _refuse(where, "more lines than its bytes have room for", "records")
    *found, rest = data.split(b"\n")
    if rest or not found:  # [F-LINE-1]
        _refuse(where, f"{len(found)} lines, and {len(rest)} bytes after them", "records, each ended by a line feed")
    records = [_record(line, f"{where}, line {number}") for number, line in enumerate(found, 1)]
    keys = [(step_of(record), hashlib.sha256(line).digest()) for record, line in zip(records, found, strict=True)]
    if any(a >= b for a, b in pairwise(keys)):  # [F-LINE-2]
        _refuse(where, "records in another order, or one twice", "each once, by step and sha256")
    if len({record.repository for record in records}) > 1:  # [F-LINE-3]
        _refuse(where, "records of two repositories", "those of one")
    return records


def check_name(records: Sequence[Manifest | Edge], name: PackName, where: str) -> None:
    """Refuse a pack whose records are not those that its name says: FormatError ``pack-field``."""
    found = (step_of(records[0]), step_of(records[-1]), len(records))
    if found != (name.first, name.last, name.records):  # [F-LINE-4]
        have = "{2} records of steps {0} to {1}".format(*found)
        _refuse(where, have, f"{name.records} of steps {name.first} to {name.last}")


def step_of(record: Manifest | Edge) -> int:
    """The step of a manifest, or the one that an edge leads to."""
    return record.step if isinstance(record, Manifest) else record.end.step


def _record(line: bytes, where: str) -> Manifest | Edge:
    value = loads_strict(line, limit=manifest.MAX_MANIFEST, where=where)
    if isinstance(value, dict) and value.get("format") == edge.FORMAT:
        return edge.decode(line, where)
    return manifest.decode(line, where)


def _refuse(where: str, have: str, need: str) -> NoReturn:
    raise FormatError("pack-field", where=where, have=have, need=need)
