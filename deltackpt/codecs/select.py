"""Which encoding a change gets: the one asked for, or the smallest that carries it exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from deltackpt.codecs.base import Auto, Codec, Effect, Shape
from deltackpt.codecs.bits import Ints
from deltackpt.codecs.many import EncodedRows, ManyChanges
from deltackpt.codecs.registry import CODECS, FULL
from deltackpt.codecs.types import Change, Encoded
from deltackpt.errors import UsageError
from deltackpt.format.dtypes import DType

AUTO = "auto"
DENSE = 4  # more than a quarter changed: an encoding for dense change may win
SMALL = 1 << 16  # elements below which `full` may be smaller than anything else


def choices() -> tuple[str, ...]:
    """What a writer may ask for: `auto`, and every encoding of a tensor that is there."""
    return (AUTO, *(codec.name for codec in CODECS if codec.effect is not Effect.REMOVES))


CHOICES = choices()
SHARES = (2, 4, 8, 16)  # ranks for which a writer may cut finer tiles


class EncodingChoice(NamedTuple):
    """What ``encoding="auto@8"`` asks for: an encoding's ``name``, or `auto`, with tiles that fit the shares of
    ``shares`` ranks; 0: as few tiles as there are without such readers."""

    name: str
    shares: int


def parse_choice(encoding: str) -> EncodingChoice:
    """Raises UsageError ``encoding-choice`` for what is neither one of `choices`, nor one with ``@`` and `SHARES`."""
    name, at, ranks = encoding.partition("@") if isinstance(encoding, str) else (encoding, "", "")
    if name not in (AUTO, *choices()) or (at and ranks not in map(str, SHARES)):
        need = f"{', '.join(choices())}; any of them with @N for tiles that N ranks share, N = 2, 4, 8 or 16"
        raise UsageError("encoding-choice", where="encoding", have=repr(encoding)[:80], need=need)
    return EncodingChoice(name, int(ranks or 0))


def alone(encoding: str) -> Codec[Any] | None:
    """The encoding that a writer who asked for ``encoding`` may use for a change whose other elements are not at hand.

    None where it needs them all. Raises UsageError ``encoding-choice``.
    """
    encoding = parse_choice(encoding).name
    wanted = [c for c in CODECS if c.auto is Auto.SPARSE] if encoding == AUTO else [CODECS[encoding]]
    return next((codec for codec in wanted if codec.alone), None)


def wants_base(encoding: str, dtype: DType, elements: int, changes: int) -> bool:
    """May a writer who asked for ``encoding`` choose another than `alone` says, and so look at all elements?

    Of a tensor or box of so many storage ``elements``, ``changes`` of which changed. Raises UsageError
    ``encoding-choice``.
    """
    return looks_at_all(alone(encoding), dtype, elements, changes)


def looks_at_all(codec: Codec[Any] | None, dtype: DType, elements: int, changes: int) -> bool:
    """The same where ``codec`` is what `alone` gives."""
    return codec is None or not codec.takes_dtype(dtype) or elements < SMALL or changes * DENSE > elements


def encode(
    change: Change,
    shape: Shape,
    encoding: str = AUTO,
    *,
    boxed: bool = False,
) -> tuple[str, Encoded]:
    """One tensor's change in the encoding asked for, or in the smallest one that can carry it exactly.

    ``shape`` is the box's, as a checkpoint's header has it. ``boxed``: a box of a tensor, which some encodings do not
    carry. -> (name of the encoding used, its bytes). Raises UsageError ``encoding-choice`` for a name that is not among
    `choices`.
    """
    encoding, shares = parse_choice(encoding)
    if shares != change.shares:
        change = replace(change, shares=shares)
    if change.base is not None:
        if encoding != AUTO and (encoded := _tried(CODECS[encoding], change, shape, boxed=boxed)) is not None:
            return encoding, encoded
        found = _candidates(change, shape, boxed=boxed)
        sizes = {name: got.size + len(CODECS[name].write_detail(got.detail)) for name, got in found.items()}
        best = min(sizes, key=lambda name: sizes[name]) if sizes else None
        if best is not None and sizes[best] < change.target.nbytes:
            return best, found[best]
    encoded = FULL.encode(change, shape, boxed=boxed)
    return FULL.name, encoded


@dataclass(frozen=True)
class EncodedMany:
    """Tensors ``which`` (int64, rising) of many, encoded: some are ``rows``, in which tensor ``held[i]`` (int64) is row
    i; the ``others`` are by their number, with the name of the encoding used. What is among the others counts, if it is
    in both.
    """

    which: Ints
    rows: EncodedRows | None
    held: Ints
    others: Mapping[int, tuple[str, Encoded]]


def encode_many(changes: ManyChanges, which: Ints, encoding: str = AUTO) -> EncodedMany:
    """`encode` of the tensors ``which`` (int64, rising) of many, whole ones that changed: in one call what is asked
    for, or wins nearly always.
    """
    asked, (encoding, shares) = encoding, parse_choice(encoding)
    changes = replace(changes, shares=shares)
    sparse = [c for c in CODECS if c.auto is Auto.SPARSE] if encoding == AUTO else [CODECS[encoding]]
    first, held, rows = sparse[0], which[:0], None
    if len(sparse) == 1:
        takes = np.array([first.takes_dtype(dtype) for dtype, _ in changes.forms], bool)
        held = which[takes[changes.form[which]]]
        if encoding == AUTO:
            held = held[changes.counts[held] * DENSE <= changes.elements[held]]
        rows = first.encode_rows(changes, held) if len(held) else None
    if rows is None:
        held = which[:0]
    good = held
    # Where others are tried too, or it is not smaller than the tensor, each tensor is by itself.
    if rows is not None and encoding == AUTO:
        good = held[rows.sizes + rows.detail_sizes < changes.nbytes[held]]
    alone = np.setdiff1d(which, good, assume_unique=True).tolist()
    return EncodedMany(which, rows, held, {i: encode(changes.change(i), changes.shape(i), asked) for i in alone})


def _candidates(change: Change, shape: Shape, *, boxed: bool) -> dict[str, Encoded]:
    """What `auto` tries: see `Auto`."""
    found: dict[str, Encoded] = {}

    def attempt(when: Auto) -> None:
        for codec in CODECS:
            if codec.auto is when and (encoded := _tried(codec, change, shape, boxed=boxed)):
                found[codec.name] = encoded

    if change.withheld is None:
        attempt(Auto.SPARSE)
        if not found:
            attempt(Auto.SPARSE_ELSE)
    if not found or change.count * DENSE > change.elements:
        attempt(Auto.DENSE)
    return found


def _tried(codec: Codec[Any], change: Change, shape: Shape, *, boxed: bool) -> Encoded | None:
    if not codec.takes_dtype(change.dtype) or (boxed and not codec.boxes):
        return None
    return codec.encode(change, shape, boxed=boxed)
