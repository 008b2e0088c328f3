"""The encodings that this library knows, by version of the part (REGISTRY section "Encodings"): one line each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from deltackpt.codecs.base import Codec, Shape
from deltackpt.codecs.full import FullCodec
from deltackpt.codecs.index import IndexCodec
from deltackpt.codecs.nan import NanCodec
from deltackpt.codecs.packed.encoding import PackedCodec
from deltackpt.codecs.planes import PlanesCodec
from deltackpt.codecs.removed import RemovedCodec
from deltackpt.codecs.v1.encoding import PackedCodecV1
from deltackpt.codecs.v1.full import FullCodecV1
from deltackpt.format.dtypes import DType, byte_shape, storage_shape

MAX_CODES = 64  # codes of encodings are below it: the upper bits of the code byte say other things

StorageShape = Callable[[DType, Sequence[int]], Shape]


class Registry:
    """Encodings of one version of a part, by name, and by their code in the part table; both are used once.

    ``storage_shape`` is how that version counts a shape in storage elements.
    """

    def __init__(self, version: int, codecs: Iterable[Codec[Any]], storage: StorageShape) -> None:
        self.version, self.storage_shape = version, storage
        self._by_name: dict[str, Codec[Any]] = {}
        self._by_code: dict[int, Codec[Any]] = {}
        for codec in codecs:
            self._add(codec)

    def __iter__(self) -> Iterator[Codec[Any]]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> Codec[Any]:
        """The encoding of this name. Raises KeyError."""
        return self._by_name[name]

    def of_code(self, code: int) -> Codec[Any] | None:
        """The encoding of this code, without the bits of the code byte; None if it is not known."""
        return self._by_code.get(code)

    @contextmanager
    def including(self, codec: Codec[Any]) -> Iterator[None]:
        """With one more encoding, in the whole process: for an experiment. What it writes, nothing else can read."""
        self._add(codec)
        try:
            yield
        finally:
            del self._by_name[codec.name], self._by_code[codec.code]

    def _add(self, codec: Codec[Any]) -> None:
        if codec.name in self._by_name or codec.code in self._by_code or not 0 <= codec.code < MAX_CODES:
            raise ValueError(f"an encoding of name {codec.name!r} or code {codec.code} cannot be added")
        self._by_name[codec.name] = self._by_code[codec.code] = codec


FULL, REMOVED = FullCodec(), RemovedCodec()  # the two that a patch cannot do without
_SAME = (IndexCodec(), NanCodec(), PlanesCodec())  # in both versions

# In the order in which a writer is offered them, from the one of choice to the last resort.
CODECS = Registry(2, (PackedCodec(), *_SAME, FULL, REMOVED), storage_shape)  # of what is written
_CODECS_V1 = Registry(1, (PackedCodecV1(), *_SAME, FullCodecV1(), REMOVED), byte_shape)  # of what is only read
VERSIONS = {codecs.version: codecs for codecs in (_CODECS_V1, CODECS)}
