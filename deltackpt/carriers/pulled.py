"""The parts in another rank's memory as a source: pulled over TCP, or over torch.distributed, and proven on arrival."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from deltackpt.carriers.groups import BACKENDS
from deltackpt.carriers.handshake import introduce
from deltackpt.carriers.memory import UNHASHED
from deltackpt.carriers.pairs import Pair, Payload, meet
from deltackpt.carriers.wire import Deadline, Wire, error_of, foreign
from deltackpt.errors import FormatError
from deltackpt.format.manifest import File
from deltackpt.patch.index import Span
from deltackpt.patch.part import PartReader

CARRIERS = ("tcp", "gloo", "nccl", "nixl")
Address = tuple[str, int]
T = TypeVar("T")


class PulledParts:
    """A `PartSource` over one publishing rank, at ``address``.

    ``carrier`` says what the payload goes over: "tcp", the connection itself, "gloo", "nccl" or "nixl"; with "nccl"
    what is wanted in host memory comes over the connection too, and what `tensors` is asked for to ``device``.
    ``timeout`` in seconds is for one request, its bytes included. It connects when it is first asked, and again after
    an error.
    """

    parallel = 1

    def __init__(
        self, address: Address, rank: int, token: str, carrier: str, timeout: float,
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        self.url = f"trainer rank {rank} at {address[0]}:{address[1]}"
        self.received = 0  # bytes of payload, in all
        self.timeout = timeout
        self._address, self._token, self._carrier, self._device = address, token, carrier, device
        self._cards = carrier in BACKENDS and BACKENDS[carrier].cards  # with a receiver on the host no pair is made
        self.to_card = self._cards and device is not None
        self._wire: Wire | None = None
        self._pair: Payload | None = None
        self._lock = threading.Lock()
        self._begun: _Begun | None = None  # what was asked for last, and may be on its way

    def part(self, file: File) -> memoryview:
        """A whole part, uint8. For bytes with another sha256 FormatError ``object-hash`` names the rank, and the first
        tensor of the part that is damaged; of a part that nobody hashed all checksums of its table are compared. Else
        raises what `PartSource.part` does."""
        data = self._to_host(file, None, [file.size])
        if file.sha256 == UNHASHED:
            check_all(PartReader(data, f"{self.url}/{file.name}"))
            return data
        found = hashlib.sha256(data).hexdigest()
        if found != file.sha256:
            where = f"{self.url}, {file.name}{_first_damaged(data)}"
            raise FormatError("object-hash", where=where, have=f"sha256 {found[:16]}", need=file.sha256[:16])
        return data

    def ranges(self, file: File, spans: Sequence[Span]) -> list[memoryview]:
        """The bytes of every span, uint8, by one request."""
        sizes = [end - start for start, end in spans]
        return _cut(self._to_host(file, spans, sizes), sizes)

    def tensors(self, file: File, spans: Sequence[Span]) -> list[torch.Tensor]:
        """The same as tensors on the pair's device, uint8 [bytes]: on a card none of them was on the host. For the
        carriers "gloo" and "nccl"."""
        return self.begin_tensors(file, spans)()

    def begin_tensors(self, file: File, spans: Sequence[Span]) -> Callable[[], list[torch.Tensor]]:
        """The same in two: bytes are on their way, and what is returned waits for them. The next request does so, too.

        Another thread may not use the tensors' memory before that: it belongs to the caller's stream.
        """
        return self.begin_part(file, (), spans)[1]

    def begin_part(
        self, file: File, near: Sequence[Span], spans: Sequence[Span]
    ) -> tuple[list[memoryview], Callable[[], list[torch.Tensor]]]:  # fmt: skip
        """The same, and the bytes of ``near`` spans in host memory, by one request."""
        sizes = [end - start for start, end in spans]
        nearby = [end - start for start, end in near]

        def receive(wire: Wire, deadline: Deadline) -> tuple[memoryview, Callable[[], torch.Tensor]]:
            assert isinstance(self._pair, Pair)
            into = memoryview(bytearray(sum(nearby)))
            wire.receive_into(into, deadline)
            return into.toreadonly(), self._pair.begin_tensor(sum(sizes), deadline)

        here, complete = self._request(file, spans, sizes, receive, wire=False, near=near)
        self.received += sum(nearby)
        begun = _Begun(complete, sizes, self._arrived)
        self._begun = begun
        return _cut(here, nearby), begun.wait

    def close(self) -> None:
        """End the connection."""
        self._begun = None
        if self._wire is not None:
            self._wire.close()
        if isinstance(self._pair, Pair):
            self._pair.close()
        self._wire = self._pair = None

    def _arrived(self, whole: bool) -> None:
        self._begun = None
        if not whole:
            self.close()

    def _to_host(self, file: File, spans: Sequence[Span] | None, sizes: list[int]) -> memoryview:
        def receive(wire: Wire, deadline: Deadline) -> memoryview:
            into = memoryview(bytearray(sum(sizes)))
            if self._pair is not None and not self._cards:
                self._pair.receive(into, deadline)
            else:
                wire.receive_into(into, deadline)
            return into.toreadonly()

        return self._request(file, spans, sizes, receive, wire=self._cards)

    def _request(
        self, file: File, spans: Sequence[Span] | None, sizes: list[int], receive: Callable[[Wire, Deadline], T], *,
        wire: bool, near: Sequence[Span] = (),
    ) -> T:  # fmt: skip
        """Ask for bytes, and ``receive`` them: those of ``near`` spans, and with ``wire`` all, over the connection
        itself."""
        deadline = Deadline(self.timeout)
        with self._lock:
            if (begun := self._begun) is not None:
                begun.wait()
            try:
                peer = self._connected(deadline)
                asked = [list(s) for s in spans] if spans is not None else None
                more: dict[str, Any] = {"wire": True} if wire else {}
                if near:
                    more["near"] = [list(s) for s in near]
                peer.send({"part": file.name, "spans": asked, **more}, deadline)
                answer = peer.receive(deadline)
                if "error" in answer:
                    raise error_of(answer["error"], self.url)
                if answer.get("sizes") != sizes or answer.get("near", []) != [end - start for start, end in near]:
                    have = f"{answer.get('sizes')} bytes"
                    raise FormatError("object-short", where=f"{self.url}, {file.name}", have=have, need=f"{sizes}")
                found = receive(peer, deadline)
            except BaseException:  # what is left of the answer is nothing that the next request has asked for
                self.close()
                raise
        self.received += sum(sizes)
        return found

    def _connected(self, deadline: Deadline) -> Wire:
        if self._wire is None:
            wire = Wire.connect(self._address, self.url, deadline)
            try:
                pair = None if self._carrier == "tcp" or self._cards > self.to_card else self._carrier
                introduce(wire, self._token, {"kind": "pull", "pair": pair}, deadline)
                self._pair = meet(wire, self._address[0], pair, self._device, deadline) if pair else None
            except BaseException:
                wire.close()
                raise
            self._wire = wire
        return self._wire


class _Begun:
    """Bytes that are on their way. ``ended`` is called once, with whether they have arrived. Any thread may wait, any
    number of times."""

    def __init__(
        self, complete: Callable[[], torch.Tensor], sizes: list[int], ended: Callable[[bool], None]
    ) -> None:  # fmt: skip
        self._complete: Callable[[], torch.Tensor] | None = complete
        self._sizes, self._ended = sizes, ended
        self._found: list[torch.Tensor] = []
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def wait(self) -> list[torch.Tensor]:
        """The spans' tensors."""
        with self._lock:
            if self._complete is not None:
                try:
                    self._found = list(self._complete().split(self._sizes))
                except BaseException as error:
                    self._error = error
                self._complete = None
                self._ended(self._error is None)
            if self._error is not None:
                raise self._error
            return self._found


class ManySources:
    """A `PartSource` over several: each part comes from the rank that offers it."""

    parallel = 4

    def __init__(self, owners: dict[str, PulledParts]) -> None:
        self._owners = owners
        self.url = "the trainer's memory"

    def part(self, file: File) -> memoryview:
        """A whole part, uint8, from its rank."""
        return self.of(file).part(file)

    def ranges(self, file: File, spans: Sequence[Span]) -> list[memoryview]:
        """The bytes of every span, uint8, from the part's rank."""
        return self.of(file).ranges(file, spans)

    def tensors(self, file: File, spans: Sequence[Span]) -> list[torch.Tensor]:
        """The bytes of every span on the pair's device, from the part's rank."""
        return self.of(file).tensors(file, spans)

    @property
    def to_card(self) -> bool:
        """Do `tensors` lie on a card?"""
        return any(owner.to_card for owner in self._owners.values())

    def of(self, file: File) -> PulledParts:
        """The rank that offers a part, which errors are to name. Raises FormatError ``live-message``."""
        if file.name not in self._owners:
            raise foreign(self.url, f"a part {file.name!r} of no rank", "one that was announced")
        return self._owners[file.name]


def check_all(part: PartReader) -> None:
    """Raise FormatError unless the bytes of every entry have the checksums of the part's own table."""
    for entry in part.entries:
        part.check(entry)


def _cut(data: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    found, at = [], 0
    for size in sizes:
        found.append(data[at : at + size])
        at += size
    return found


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
