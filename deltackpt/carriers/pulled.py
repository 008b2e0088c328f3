"""The parts in another rank's memory as a source: pulled over TCP, or over torch.distributed, and proven on arrival."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence

from deltackpt.carriers.handshake import introduce
from deltackpt.carriers.pairs import Payload, meet
from deltackpt.carriers.wire import Deadline, Wire, error_of, foreign
from deltackpt.errors import FormatError
from deltackpt.format.manifest import File
from deltackpt.patch.index import Span
from deltackpt.patch.part import PartReader

CARRIERS = ("tcp", "gloo", "nixl")
Address = tuple[str, int]


class PulledParts:
    """A `PartSource` over one publishing rank, at ``address``.

    ``carrier`` says what the payload goes over: "tcp", the connection itself, "gloo" or "nixl". ``timeout`` in seconds
    is for one request, its bytes included. It connects when it is first asked, and again after an error.
    """

    parallel = 1

    def __init__(self, address: Address, rank: int, token: str, carrier: str, timeout: float) -> None:
        self.url = f"trainer rank {rank} at {address[0]}:{address[1]}"
        self.received = 0  # bytes of payload, in all
        self.timeout = timeout
        self._address, self._token, self._carrier = address, token, carrier
        self._wire: Wire | None = None
        self._pair: Payload | None = None
        self._lock = threading.Lock()

    def part(self, file: File) -> memoryview:
        """A whole part, uint8. For bytes with another sha256 FormatError ``object-hash`` names the rank, and the first
        tensor of the part that is damaged; else raises what `PartSource.part` does."""
        data = self._request(file, None, [file.size])
        found = hashlib.sha256(data).hexdigest()
        if found != file.sha256:
            where = f"{self.url}, {file.name}{_first_damaged(data)}"
            raise FormatError("object-hash", where=where, have=f"sha256 {found[:16]}", need=file.sha256[:16])
        return data

    def ranges(self, file: File, spans: Sequence[Span]) -> list[memoryview]:
        """The bytes of every span, uint8, by one request."""
        sizes = [end - start for start, end in spans]
        data, found, at = self._request(file, spans, sizes), [], 0
        for size in sizes:
            found.append(data[at : at + size])
            at += size
        return found

    def close(self) -> None:
        """End the connection."""
        if self._wire is not None:
            self._wire.close()
        self._wire = self._pair = None

    def _request(self, file: File, spans: Sequence[Span] | None, sizes: list[int]) -> memoryview:
        deadline = Deadline(self.timeout)
        with self._lock:
            try:
                wire = self._connected(deadline)
                wire.send(
                    {"part": file.name, "spans": [list(s) for s in spans] if spans is not None else None}, deadline
                )
                answer = wire.receive(deadline)
                if "error" in answer:
                    raise error_of(answer["error"], self.url)
                if answer.get("sizes") != sizes:
                    have = f"{answer.get('sizes')} bytes"
                    raise FormatError("object-short", where=f"{self.url}, {file.name}", have=have, need=f"{sizes}")
                into = memoryview(bytearray(sum(sizes)))
                if self._pair is not None:
                    self._pair.receive(into, deadline)
                else:
                    wire.receive_into(into, deadline)
            except BaseException:  # what is left of the answer is nothing that the next request has asked for
                self.close()
                raise
        self.received += len(into)
        return into.toreadonly()

    def _connected(self, deadline: Deadline) -> Wire:
        if self._wire is None:
            wire = Wire.connect(self._address, self.url, deadline)
            try:
                pair = None if self._carrier == "tcp" else self._carrier
                introduce(wire, self._token, {"kind": "pull", "pair": pair}, deadline)
                self._pair = meet(wire, self._address[0], pair, deadline) if pair else None
            except BaseException:
                wire.close()
                raise
            self._wire = wire
        return self._wire


class ManySources:
    """A `PartSource` over several: each part comes from the rank that offers it."""

    parallel = 4

    def __init__(self, owners: dict[str, PulledParts]) -> None:
        self._owners = owners
        self.url = "the trainer's memory"

    def part(self, file: File) -> memoryview:
        """A whole part, uint8, from its rank."""
        return self._of(file).part(file)

    def ranges(self, file: File, spans: Sequence[Span]) -> list[memoryview]:
        """The bytes of every span, uint8, from the part's rank."""
        return self._of(file).ranges(file, spans)

    def _of(self, file: File) -> PulledParts:
        if file.name not in self._owners:
            raise foreign(self.url, f"a part {file.name!r} of no rank", "one that was announced")
        return self._owners[file.name]


def _first_damaged(data: memoryview) -> str:
    """Which tensor, and which tile of it, does not have the checksum of the part's own table."""
    try:
        part = PartReader(data, "")
        for entry in part.entries:
            try:
                part.check(entry)
            except FormatError as error:
                return f"{error.where}, {error.have}"
    except FormatError as error:
        return f", {error.have}"
    return ", foreign bytes: a part that is sound, and another one"
