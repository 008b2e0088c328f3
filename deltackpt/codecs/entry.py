"""An entry of the part table: what a part holds of one tensor (FORMAT section "Part table")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deltackpt.codecs.base import BaseUse, Codec, Effect, PlainSpec, Shape
from deltackpt.codecs.boxes import slices
from deltackpt.codecs.registry import CODECS, REMOVED, VERSIONS
from deltackpt.codecs.types import NO_DETAIL, Detail, Elements
from deltackpt.format.dtypes import DTYPES, DType, nbytes

NO_DTYPE = DTYPES["U8"]  # stands for that of a removed tensor, which the table does not tell


@dataclass(frozen=True)
class Entry:
    """What a part holds of one tensor: all of it, or the box of ``shape`` at ``offset`` in the global ``whole``."""

    name: str
    encoding: str  # a name in the registry
    dtype: DType
    shape: Shape = ()  # of the box, in elements as a checkpoint's header counts them
    whole: Shape = ()
    offset: Shape = ()
    detail: Detail = NO_DETAIL
    version: int = CODECS.version  # of the part, which says what its bytes are

    @classmethod
    def removal(cls, name: str, version: int = CODECS.version) -> Entry:
        """Of a tensor that goes."""
        return cls(name, REMOVED.name, NO_DTYPE, version=version)

    @property
    def codec(self) -> Codec[Any]:
        """The encoding."""
        return VERSIONS[self.version][self.encoding]

    @property
    def boxed(self) -> bool:
        """Is it a box, less than the whole tensor?"""
        return self.shape != self.whole

    @property
    def removes(self) -> bool:
        """Does the tensor go?"""
        return self.codec.effect is Effect.REMOVES

    @property
    def replaces(self) -> bool:
        """Does it hold all elements of its tensor or box, whatever was there before?"""
        return self.codec.effect is Effect.REPLACES

    @property
    def has_pieces(self) -> bool:
        """Can some of it be decoded without the rest?"""
        return self.codec.pieces is not None

    @property
    def base_use(self) -> BaseUse:
        """Which old elements decoding reads."""
        return self.codec.base_use(self.detail)

    @property
    def changes(self) -> int:
        """Changed storage elements."""
        return self.detail.changes

    @property
    def storage(self) -> Shape:
        """Shape of the tensor or box in storage elements, as the part's version counts them."""
        return VERSIONS[self.version].storage_shape(self.dtype, self.shape)

    @property
    def elements(self) -> int:
        """Storage elements of the tensor or box."""
        return nbytes(self.dtype, self.shape) // self.dtype.width

    @property
    def payload(self) -> int:
        """Bytes in the part's payload tensor."""
        return self.codec.payload_size(self)

    @property
    def plain_tensors(self) -> tuple[PlainSpec, ...]:
        """The plain tensors that it owns, in the order of its checksum."""
        return tuple(self.codec.plain_tensors(self))

    def box_of(self, words: Elements) -> Elements:
        """Its elements, shape (elements,), among all those of its tensor: a view if it is whole or contiguous."""
        if not self.boxed:
            return words
        inside: Elements = words.reshape(self.whole)[slices(self.offset, self.shape)].reshape(-1)
        return inside
