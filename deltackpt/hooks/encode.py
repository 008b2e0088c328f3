"""A delta as an entry of a part."""

from __future__ import annotations

import numpy as np

from deltackpt.codecs import CODECS, SCAN_LIMIT, Change, Encoded, Entry, alone, encode
from deltackpt.format import state_digest
from deltackpt.format.dtypes import storage_shape, uint
from deltackpt.format.state_digest import Sums
from deltackpt.patch.encode import fitting_entry
from deltackpt.torch_views.delta import Delta


def entry_of(
    delta: Delta, names: set[str], *, encoding: str = "auto", scan_limit: int = SCAN_LIMIT
) -> tuple[Entry, Encoded]:
    """Encode what changed; the bytes are those that `deltackpt write` makes of the same change."""
    box = delta.box

    def coded(choice: str) -> tuple[str, Encoded]:
        if delta.coded is None or choice != encoding:
            return _encode(delta, choice, scan_limit)
        made: tuple[str, Encoded] = delta.coded()
        return made

    return fitting_entry(delta.name, delta.dtype, box.shape, box.whole, box.offset, names, coded, encoding)


def _encode(delta: Delta, encoding: str, scan_limit: int) -> tuple[str, Encoded]:
    box, width = delta.box, uint(delta.dtype.width)
    base, target = delta.base, delta.target()
    if base is None or target is None:
        # Such an encoding of a large tensor looks at changed elements only; the others are never read.
        used = alone(encoding)
        assert used is not None
        assert CODECS[used].takes_dtype(delta.dtype)
        assert not (delta.dtype.sign_magnitude and delta.elements < scan_limit)
        encoding, base = used, np.broadcast_to(np.zeros(1, width), (delta.elements,))
        target = base
    shape = storage_shape(delta.dtype, box.shape)
    positions = delta.positions.astype(np.int64)
    change = Change(delta.dtype, shape, positions, delta.old, delta.new, base, target)
    return encode(change, box.shape, encoding, scan_limit=scan_limit, boxed=box.proper)


def sums_of(delta: Delta) -> Sums:
    """What the tensor's sums gain by the change."""
    if delta.sums is not None:
        return delta.sums
    return state_digest.of_change(delta.box.to_whole(delta.positions), delta.old, delta.new)
