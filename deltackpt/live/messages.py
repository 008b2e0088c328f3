"""What trainer and engines say to each other, checked when it arrives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltackpt.carriers.pulled import CARRIERS
from deltackpt.carriers.wire import foreign
from deltackpt.format.dtypes import DTYPES
from deltackpt.format.manifest import File, Link
from deltackpt.format.safetensors_header import MAX_HEADER, Tensor
from deltackpt.format.signature import Signature
from deltackpt.format.state_digest import Sums
from deltackpt.patch.index import MAX_TABLE
from deltackpt.patch.part import NOWHERE, Near
from deltackpt.repository.chain import Hop

NOTHING = "0" * 64  # in the place of a parent's id and of a base: the parts hold all of the weights
MAX_PARTS = 1 << 16
MAX_HEAD = 8 + MAX_HEADER
_HEX64 = re.compile("[0-9a-f]{64}")
_HEX128 = re.compile("[0-9a-f]{128}")
_HEX32 = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class PartOffer:
    """A part, and the trainer's rank that offers it, which listens at ``address``. Where nobody asks for signatures
    and bytes go from card to card, its sha256 is `carriers.memory.UNHASHED`. ``near`` says where its header and table
    are, if that is known: a receiver then asks for them, and for all else, at once."""

    file: File
    rank: int
    address: tuple[str, int]
    near: Near = NOWHERE


@dataclass(frozen=True)
class Announcement:
    """A step that is offered. ``parts`` take the state ``base`` to ``state``; ``sums`` are those of the tensors that
    change, after it. With a base of NOTHING the parts are all of the weights, and ``sums`` of every tensor. ``time``
    (microseconds since 1970) and ``signature``: see `signed.message_of`.
    """

    round: int
    step: int
    repository: str
    parent: str
    base: str
    state: str
    parts: tuple[PartOffer, ...]
    sums: Mapping[str, Sums]
    time: int = 0
    signature: Signature | None = None

    @property
    def full(self) -> bool:
        """Are the parts all of the weights?"""
        return self.base == NOTHING

    @property
    def hop(self) -> Hop:
        """As a move of a chain. The ids are the session's: the manifest may not be written yet."""
        start, end = Link(max(0, self.step - 1), self.parent), Link(self.step, self.state)
        return Hop(self.repository, start, end, self.base, tuple(p.file for p in self.parts))

    def to_dict(self) -> dict[str, Any]:
        """As a message."""
        return {
            "round": self.round,
            "step": self.step,
            "repository": self.repository,
            "parent": self.parent,
            "base": self.base,
            "state": self.state,
            "parts": [[p.file.name, p.file.size, p.file.sha256, p.rank, *p.address, *p.near] for p in self.parts],
            "sums": sums_to(self.sums),
            "time": self.time,
            "signature": [self.signature.key, self.signature.signature] if self.signature else None,
        }

    @classmethod
    def of(cls, found: object, where: str) -> Announcement:
        """Raises FormatError ``live-message``."""
        fields = fields_of(
            found, where, round=int, step=int, repository=str, parent=str, base=str, state=str, parts=list, time=int
        )
        hexes = [fields[key] for key in ("parent", "base", "state")]
        if not all(map(_HEX64.fullmatch, hexes)) or not _HEX32.fullmatch(fields["repository"]):
            raise foreign(where, "ids that are none", "hex digits")
        if len(fields["parts"]) > MAX_PARTS:
            raise foreign(where, f"{len(fields['parts']):,} parts", f"at most {MAX_PARTS:,}")
        parts = tuple(_offer(part, where) for part in fields["parts"])
        assert isinstance(found, dict)
        sums = sums_of(found.get("sums"), where)
        ids = (fields["repository"], fields["parent"], fields["base"], fields["state"])
        signature = _signature(found.get("signature"), where)
        return cls(fields["round"], fields["step"], *ids, parts, sums, fields["time"], signature)


@dataclass(frozen=True)
class Welcome:
    """What an engine's rank learns when it joins: the session's tensors, its step (None before the first), and how the
    parts come. ``repository`` is the URL of the one that the trainer publishes into.
    """

    repository: str
    ref: str
    table: Mapping[str, Tensor]
    step: int | None
    state: str | None
    sums: Mapping[str, Sums]
    carrier: str
    timeout: float
    load_timeout: float

    def to_dict(self) -> dict[str, Any]:
        """As a message."""
        return {
            "repository": self.repository,
            "ref": self.ref,
            "table": [[t.name, t.dtype, list(t.shape), t.end - t.start] for t in self.table.values()],
            "step": self.step,
            "state": self.state,
            "sums": sums_to(self.sums),
            "carrier": self.carrier,
            "milliseconds": [round(self.timeout * 1000), round(self.load_timeout * 1000)],
        }

    @classmethod
    def of(cls, found: object, where: str) -> Welcome:
        """Raises FormatError ``live-message``."""
        fields = fields_of(found, where, repository=str, ref=str, table=list, carrier=str, milliseconds=list)
        assert isinstance(found, dict)
        step, state, times = found.get("step"), found.get("state"), fields["milliseconds"]
        if fields["carrier"] not in CARRIERS or len(times) != 2 or not all(type(t) is int and t > 0 for t in times):
            raise foreign(where, f"carrier {fields['carrier']!r}, times {times!r}", f"one of {', '.join(CARRIERS)}")
        if (state is None) != (step is None) or not (state is None or (_is(state, str) and _HEX64.fullmatch(state))):
            raise foreign(where, f"step {step!r}, state {state!r}", "a step and its state digest")
        table = {row.name: row for row in (_tensor(row, where) for row in fields["table"])}
        sums = sums_of(found.get("sums"), where)
        return cls(
            fields["repository"], fields["ref"], table, step, state, sums, fields["carrier"],
            times[0] / 1000, times[1] / 1000,
        )  # fmt: skip


def sums_to(sums: Mapping[str, Sums]) -> dict[str, str]:
    """{name: 32 hex digits}"""
    return {name: f"{a:016x}{b:016x}" for name, (a, b) in sums.items()}


def sums_of(found: object, where: str) -> dict[str, Sums]:
    """Inverse of `sums_to`. Raises FormatError ``live-message``."""
    if not isinstance(found, dict) or not all(_is(text, str) and _HEX32.fullmatch(text) for text in found.values()):
        raise foreign(where, "sums that are none", "32 hex digits by name")
    return {name: (int(text[:16], 16), int(text[16:], 16)) for name, text in found.items()}


def fields_of(found: object, where: str, **kinds: type) -> dict[str, Any]:
    """The fields of a message, each of its type. Raises FormatError ``live-message``."""
    if not isinstance(found, dict) or not all(_is(found.get(name), kind) for name, kind in kinds.items()):
        raise foreign(where, f"{str(found)[:100]}", f"an object with {', '.join(kinds)}")
    return {name: found[name] for name in kinds}


def _is(value: object, kind: type) -> bool:
    return type(value) is kind


def _offer(found: object, where: str) -> PartOffer:
    if not isinstance(found, list) or [type(x) for x in found] != [str, int, str, int, str, int, int, int, int]:
        raise foreign(where, f"a part {str(found)[:80]}", "name, size, sha256, rank, host, port, and three places")
    name, size, sha256, rank, host, port, head, table, end = found
    if not 0 <= head <= table <= end <= size or not _HEX64.fullmatch(sha256) or not 0 < port < 1 << 16:
        raise foreign(where, f"a part {str(found)[:80]}", "a size, a sha256, a port, and places within it")
    if head > MAX_HEAD or end - table > MAX_TABLE:
        raise foreign(where, f"a part {str(found)[:80]}", "a header and a table of bounded sizes")
    return PartOffer(File(name, size, sha256), rank, (host, port), (head, table, end))


def _signature(found: object, where: str) -> Signature | None:
    if found is None:
        return None
    known = isinstance(found, list) and [type(x) for x in found] == [str, str]
    if not known or not _HEX64.fullmatch(found[0]) or not _HEX128.fullmatch(found[1]):  # type: ignore[index]
        raise foreign(where, f"a signature {str(found)[:80]}", "a key and a signature, in hex")
    return Signature(*found)  # type: ignore[misc]


def _tensor(found: object, where: str) -> Tensor:
    row: list[Any] = found if isinstance(found, list) else []
    known = [type(x) for x in row] == [str, str, list, int] and row[1] in DTYPES
    if not known or not all(type(n) is int and n >= 0 for n in row[2]):
        raise foreign(where, f"a tensor {str(found)[:80]}", "name, dtype, shape, bytes")
    return Tensor(row[0], row[1], tuple(row[2]), 0, row[3])
