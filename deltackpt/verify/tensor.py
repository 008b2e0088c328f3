"""One tensor against the digests of a step."""

from __future__ import annotations

from collections.abc import Mapping

from deltackpt.checkpoint.diff import State, StoredTensor
from deltackpt.errors import ChainError
from deltackpt.format.digests import check_digest
from deltackpt.format.state_digest import TensorDigest
from deltackpt.patch.base import describe


def check_stored(state: State, want: StoredTensor, name: str, digests: Mapping[str, TensorDigest], where: str) -> None:
    """Prove the bytes of one tensor of ``state``; they are released after.

    Raises ChainError ``tensor-shape`` unless its dtype and shape are those of ``want``, ``tensor-differs`` unless its
    bytes have the step's digests. ``where`` names the state in errors.
    """
    have, need = state.tensors.get(name), (want.dtype, want.shape)
    if have is None or (have.dtype, have.shape) != need:
        shown = describe((have.dtype, have.shape) if have else None)
        raise ChainError("tensor-shape", where=f"{where}, {name[:200]}", have=shown, need=describe(need))
    try:
        check_digest(state.bytes_of(name), want.dtype, digests[name], where=f"{where}, {name[:200]}")
    finally:
        state.release(name)


def tensor_differs(where: str, have: str, need: str) -> None:
    """Raise ChainError ``tensor-differs``."""
    raise ChainError("tensor-differs", where=where, have=have, need=need)
