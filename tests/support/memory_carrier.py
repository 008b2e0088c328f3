"""A carrier without a repository: a sink that keeps the parts in memory, and a source over what was committed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deltackpt.checkpoint.diff import StoredTensor
from deltackpt.errors import FormatError, NotFoundError
from deltackpt.format.layout import Layout, Shard, Side
from deltackpt.format.manifest import File, Link
from deltackpt.format.safetensors_header import Tensor
from deltackpt.format.state_digest import TensorDigest
from deltackpt.patch.index import Span
from deltackpt.patch.part import Origin
from deltackpt.patch.source import StepRecord
from deltackpt.publish.sink import EncodedPart, StepCommit


@dataclass
class Carrier:
    """The publisher's memory: what was committed, and parts of steps that may be. It is the source, too."""

    repository: str = "ab" * 16
    url: str = "memory of the publisher"
    parallel: int = 4
    parts: dict[str, EncodedPart] = field(default_factory=dict)
    steps: dict[Link, tuple[StepRecord, Layout, Mapping[str, TensorDigest]]] = field(default_factory=dict)
    newest: Link | None = None
    requests: list[tuple[str, tuple[Span, ...]]] = field(default_factory=list)

    def latest(self) -> Link | None:
        return self.newest

    def step(self, link: Link) -> StepRecord:
        return self._of(link)[0]

    def layout(self, link: Link) -> Layout:
        return self._of(link)[1]

    def digests(self, link: Link) -> Mapping[str, TensorDigest]:
        return self._of(link)[2]

    def _of(self, link: Link) -> tuple[StepRecord, Layout, Mapping[str, TensorDigest]]:
        if link not in self.steps:
            raise NotFoundError("object-missing", where=self.url, have="no such step", need=f"step {link.step}")
        return self.steps[link]

    def _bytes(self, file: File) -> bytes:
        return b"".join(self.parts[file.name].host_chunks())

    def part(self, file: File) -> memoryview:
        data = self._bytes(file)
        if len(data) != file.size or hashlib.sha256(data).hexdigest() != file.sha256:
            raise FormatError("object-hash", where=file.name, have="other bytes", need=f"sha256 {file.sha256}")
        return memoryview(data)

    def ranges(self, file: File, spans: Sequence[Span]) -> list[memoryview]:
        self.requests.append((file.name, tuple(spans)))
        data = memoryview(self._bytes(file))
        return [data[start:end] for start, end in spans]

    def origin(self, step: int) -> Origin:
        """Of the parts of a step that follows the newest one."""
        assert self.newest is not None
        return Origin(self.repository, step, self.newest.id, self.steps[self.newest][0].state)


class MemorySink:
    """Publishes one step to a `Carrier`, after the newest one."""

    def __init__(self, carrier: Carrier, step: int, part_bytes: int | None = None) -> None:
        self.carrier, self.number, self.files = carrier, step, list[File]()
        self._part_bytes = part_bytes
        self.fails: Exception | None = None  # raised by `commit`

    def part_bytes(self, most: int) -> int:
        return most if self._part_bytes is None else self._part_bytes

    def put(self, part: EncodedPart) -> None:
        name = f"patches/{self.number}/part-{part.number:05d}.safetensors"
        assert name not in self.carrier.parts
        self.carrier.parts[name] = part
        self.files.append(File(name, part.size, part.sha256))

    def commit(self, record: StepCommit) -> Link:
        if self.fails is not None:
            raise self.fails
        parent = self.carrier.newest
        base = self.carrier.steps[parent][0].state if parent else None
        link = Link(self.number, hashlib.sha256(f"{parent} {record.state}".encode()).hexdigest())
        side = [(path, record.files.side_bytes(path)) for path in record.files.side]
        layout = Layout(
            tuple(Shard(s.path, s.header) for s in record.files.shards),
            tuple(Side(path, File(path, len(data), hashlib.sha256(data).hexdigest())) for path, data in side),
        )
        parts = tuple(self.files) if parent and record.patched else None
        made = StepRecord(self.carrier.repository, link, parent, base, record.state, parts)
        self.carrier.steps[link] = made, layout, dict(record.digests)
        self.carrier.newest = link
        return link

    def abort(self) -> None:
        for file in self.files:
            self.carrier.parts.pop(file.name, None)
        self.files.clear()


@dataclass
class Received:
    """A receiver's state: the bytes of every tensor, in its memory."""

    tensors: Mapping[str, StoredTensor]
    data: dict[str, npt.NDArray[np.uint8]]

    def bytes_of(self, name: str) -> npt.NDArray[np.uint8]:
        return self.data[name]

    def release(self, name: str, start: int = 0, end: int | None = None) -> None: ...

    @classmethod
    def of(cls, state: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> Received:
        """From a state of the tests."""
        tensors = {name: Tensor(name, dtype, shape, 0, len(data)) for name, (dtype, shape, data) in state.items()}
        arrays = {name: np.frombuffer(data, np.uint8) for name, (_, _, data) in state.items()}
        return cls(tensors, arrays)
