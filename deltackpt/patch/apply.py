"""One step of one tensor: what a patch holds of it, decoded, written, or put in its place (FORMAT "Applying")."""

from __future__ import annotations

import numpy as np

from deltackpt.codecs.base import Effect
from deltackpt.codecs.types import DecodeBuffer, Decoded
from deltackpt.errors import ChainError
from deltackpt.format.dtypes import DTYPES, uint
from deltackpt.patch.base import Bytes, Known, TensorPatch, describe


def changes_elements(known: Known, patch: TensorPatch) -> bool:
    """Does a tensor of dtype and shape ``known`` stay one of these by one step's patch?

    Raises ChainError ``base-shape`` where the patch does not fit what is there.
    """
    if patch.effect is Effect.REMOVES:
        return False
    mine = (patch.dtype.name, patch.shape)
    if mine == known:
        return True
    if patch.effect is Effect.REPLACES:
        return False
    where = f"{patch.where}, {patch.name[:80]!r}"
    raise ChainError("base-shape", where=where, have=describe(known), need=describe(mine))  # [F-APPLY-2]


def write_step(current: Bytes, known: Known, patch: TensorPatch) -> bool:
    """What `decode_step` gives, written to ``current``, contiguous bytes [n]; False where that gives None.

    Faster than both, as no position is kept. After an error ``current`` is worthless.
    """
    if not changes_elements(known, patch):
        return False
    patch.decode_into(current.view(uint(DTYPES[known[0]].width)))
    return True


def decode_step(current: Bytes, known: Known, patch: TensorPatch, buffer: DecodeBuffer | None = None) -> Decoded | None:
    """The new elements that one step's patch gives a tensor, at flat positions in the whole tensor.

    ``current``: its bytes, shape (bytes,), contiguous and not written to; ``known``: its dtype and shape. The result
    may lie in ``buffer``, if there is one. None where the tensor gets another dtype or shape, or goes. Raises
    ChainError ``base-shape`` where the patch does not fit what is there, FormatError for bytes that do not decode.
    """
    if not changes_elements(known, patch):
        return None
    return patch.decode(current.view(uint(DTYPES[known[0]].width)), buffer)


def replace_whole(patch: TensorPatch) -> tuple[Bytes | None, Known | None]:
    """A tensor that is new, reshaped or gone after a step: its bytes, dtype and shape, or None and None.

    Raises ChainError ``base-shape`` for a patch that needs old elements, FormatError for bytes that do not decode.
    """
    if patch.effect is Effect.REMOVES:
        return None, None
    return patch.whole().view(np.uint8), (patch.dtype.name, patch.shape)
