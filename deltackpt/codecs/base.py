"""The Codec protocol: what an encoding says of itself, and what it does (FORMAT section "Encodings").

An encoding is one module with one class that implements `Codec`. Everything else asks the codec of an entry, or a
property of the entry, and never compares names. To add an encoding: write its module, name it in `registry`, give it a
section and a code in spec/, and vectors in fixtures/. Two versions of a part may have other codecs of one code.

A decoder that runs elsewhere, on a GPU say, is found the same way: its package has a mapping from `Codec.name` to
decoder, and an encoding without one there is decoded on the host. It gets what `Codec.decode` gets: the entry with its
parsed detail, the bytes of the source, and as much of the old elements as `Codec.base_use` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import ClassVar, Protocol, TypeVar

from deltackpt.codecs.bits import Ints
from deltackpt.codecs.many import EncodedRows, ManyChanges
from deltackpt.codecs.types import (
    Change,
    ChangedElements,
    DecodeBuffer,
    Decoded,
    Detail,
    Elements,
    Encoded,
    Positions,
    Source,
)
from deltackpt.format.dtypes import DType
from deltackpt.format.varint import VarintReader

Shape = tuple[int, ...]
D = TypeVar("D", bound=Detail)
D_co = TypeVar("D_co", bound=Detail, covariant=True)
D_contra = TypeVar("D_contra", bound=Detail, contravariant=True)


class Effect(Enum):
    """What an entry does to its tensor."""

    CHANGES = "changes"  # some elements; the tensor stays one of this dtype and shape
    REPLACES = "replaces"  # all elements of the tensor or box, whatever was there before
    REMOVES = "removes"  # the tensor goes


class BaseUse(IntEnum):
    """Which old elements of its tensor or box a decoder reads."""

    NOTHING = 0
    CHANGED = 1  # those in the places that change
    ALL = 2


class Auto(IntEnum):
    """When `auto` tries an encoding. Of all that it tried, the smallest wins, if it is smaller than the tensor."""

    ASKED = 0  # never: only where the writer asks for it by name
    SPARSE = 1  # for every change, but a dense one of a tensor that is too large to hold what changed
    SPARSE_ELSE = 2  # for every change that no SPARSE encoding carries
    DENSE = 3  # where more than a quarter of the elements changed, or where nothing sparse carries the change
    WHOLE = 4  # where there are no old elements, or where nothing else is smaller than the tensor


@dataclass(frozen=True)
class PlainSpec:
    """A plain tensor that an entry owns: ``suffix`` follows the tensor's name; dtype and shape as in the header."""

    suffix: str
    dtype: str
    shape: Shape


class CodecEntry(Protocol[D_co]):
    """An entry of the part table, as its codec sees it: the tensor or box that it covers, and the codec's detail."""

    @property
    def dtype(self) -> DType:
        """Of the tensor."""

    @property
    def shape(self) -> Shape:
        """Of the tensor or box, in elements as the header of a checkpoint counts them."""

    @property
    def storage(self) -> Shape:
        """The same in storage elements, as the part's version counts them."""

    @property
    def boxed(self) -> bool:
        """Is it a box, less than the whole tensor?"""

    @property
    def elements(self) -> int:
        """Storage elements of the tensor or box."""

    @property
    def detail(self) -> D_co:
        """What the codec's `read_detail` or `encode` made."""


class Pieces(Protocol[D_contra]):
    """Runs of an entry's payload, each with a checksum, that decode without the others: tiles, or chunks."""

    in_order: ClassVar[bool]  # do all pieces together give every element once, in order?
    whole: ClassVar[bool] = True  # to decode any element of a piece, are the old ones of all of it needed?

    def lengths(self, detail: D_contra) -> Ints:
        """Bytes of every piece, in the order of the payload: shape (pieces,), int64."""

    def touched(self, entry: CodecEntry[D_contra], offset: Shape, shape: Shape) -> Ints:
        """The numbers, rising, of all pieces that may hold an element of a box that is not empty.

        ``offset`` and ``shape`` count in the storage shape of the entry's tensor or box.
        """

    def elements(self, entry: CodecEntry[D_contra], pieces: Ints) -> Ints:
        """How many elements each of ``pieces`` has, int64 [n] as they are."""

    def held(self, entry: CodecEntry[D_contra], offset: Shape, shape: Shape) -> Ints:
        """How many elements of a box that is not empty each piece has, of all of them: int64 (pieces,)."""

    def decode(
        self, entry: CodecEntry[D_contra], pieces: Ints, payload: memoryview, base: Elements, where: str
    ) -> Iterator[tuple[Positions, Elements]]:
        """Flat positions (int64) and new elements of ``pieces``, rising; ``payload`` holds their bytes in a row.

        ``base``: all old elements of the entry's tensor or box, flat; those of other pieces may be anything.
        Raises FormatError, also for a piece that does not have its checksum.
        """


@dataclass(frozen=True)
class InOrder:
    """An entry's bytes are its elements, in order: any run of them can be read without the rest, and proven by sums
    alone, as the one checksum is of all. They lie in the plain tensor of ``suffix``, or are the payload; an element
    that is the ``unchanged`` word did not change."""

    suffix: str | None
    unchanged: int | None = None


class Codec(Protocol[D]):
    """One encoding. Stateless: an instance serves all threads."""

    name: ClassVar[str]
    code: ClassVar[int]  # in the part table; fixed by REGISTRY
    effect: ClassVar[Effect] = Effect.CHANGES
    auto: ClassVar[Auto] = Auto.ASKED
    boxes: ClassVar[bool] = True  # can it carry a box of a tensor?
    dtypes: ClassVar[str] = "any dtype"  # what `takes_dtype` asks for, in words
    alone: ClassVar[bool] = False  # does `encode_changes` encode, without a look at new elements that did not change?

    def takes_dtype(self, dtype: DType) -> bool:
        """Can it carry tensors of this dtype?"""
        return True

    def write_detail(self, detail: D) -> bytes:
        """The codec's own part of a table entry."""

    def read_detail(self, reader: VarintReader, dtype: DType, shape: Shape, elements: int) -> D:
        """Inverse of `write_detail`, for a tensor or box of storage shape ``shape`` with so many storage elements.

        Checks all that the payload is not needed for, and allocates nothing that the table's bytes do not pay for.
        Raises FormatError.
        """

    def payload_size(self, entry: CodecEntry[D]) -> int:
        """Bytes in the part's payload tensor."""
        return 0

    def payload_bound(self, detail: D) -> float:
        """The same in floating point: a sum that does not wrap, whatever sizes the table claims."""
        return 0.0

    def plain_tensors(self, entry: CodecEntry[D]) -> Sequence[PlainSpec]:
        """The plain tensors that an entry owns, in the order of its checksum."""
        return ()

    def base_use(self, detail: D) -> BaseUse:
        """Which old elements `decode` reads."""
        return BaseUse.NOTHING

    @property
    def pieces(self) -> Pieces[D] | None:
        """How some of an entry is decoded without the rest; None for an encoding that is read whole."""
        return None

    def in_order(self, entry: CodecEntry[D]) -> InOrder | None:
        """How runs of elements are read without the rest; None for an encoding of another form."""
        return None

    def encode(self, change: Change, shape: Shape, *, boxed: bool) -> Encoded | None:
        """A tensor's or box's change; None where this encoding cannot carry it exactly.

        ``shape`` as the header of a checkpoint has it. ``boxed``: a box of a tensor.
        """

    def encode_rows(self, changes: ManyChanges, which: Ints) -> EncodedRows | None:
        """`encode` of the tensors ``which`` (int64, rising) of many, whole ones that changed and whose dtypes it takes,
        in one call. None for an encoding, or a machine, that encodes each by itself.
        """
        return None

    def encode_changes(
        self, changes: ChangedElements, base: Elements | None, dtype: DType, shape: Shape, shares: int = 0
    ) -> Encoded | None:
        """The same from the changed elements, of which there are some, and ``base``, all old ones, flat. None for an
        encoding that is not `alone`.

        ``shape`` counts storage elements. ``base`` None: they are not at hand, and the bytes may be more. ``shares``:
        see `Change`.
        """
        return None

    def decode(
        self,
        entry: CodecEntry[D],
        base: Elements | None,
        source: Source,
        where: str,
        buffer: DecodeBuffer | None = None,
    ) -> Decoded:
        """The new elements of an entry, at flat positions in its tensor or box.

        ``base``: its old elements, flat, as unsigned words of the dtype's width; None is allowed where `base_use` is
        NOTHING. The result may lie in ``buffer``, if there is one. Raises FormatError.
        """

    def decode_into(self, entry: CodecEntry[D], elements: Elements, source: Source, where: str) -> None:
        """Write the new elements to ``elements``, words [n] that hold the old ones. After an error they are worthless.

        Raises FormatError.
        """
        self.decode(entry, elements, source, where).write_to(elements)

    def check(self, entry: CodecEntry[D], source: Source, where: str) -> None:
        """Compare an entry's bytes with the checksums of its detail: no old element is needed. Raises FormatError."""
