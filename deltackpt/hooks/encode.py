"""A delta as a table entry of a part."""

from __future__ import annotations

from deltackpt.codecs import Encoded, Entry, alone, encode
from deltackpt.format import state_digest
from deltackpt.format.state_digest import Sums
from deltackpt.patch.encode import fitting_entry
from deltackpt.torch_views.delta import Delta


def entry_of(delta: Delta, names: set[str], *, encoding: str = "auto") -> tuple[Entry, Encoded]:
    """Encode what changed, unless it is; the bytes are those that `deltackpt write` makes, or, of a delta that has not
    kept anything of the old words, those of one class.

    ``names``: of all tensors of the state. A change whose plain tensors would have the name of another is stored in
    `full`. Raises UsageError ``encoding-choice``.
    """
    box = delta.box

    def coded(choice: str) -> tuple[str, Encoded]:
        if delta.base is not None:
            return encode(delta.change(), box.shape, choice, boxed=box.proper)
        used = alone(choice)
        assert used is not None
        return used.name, delta.encoded or delta.encode(None, choice)

    return fitting_entry(delta.name, delta.dtype, box.shape, box.whole, box.offset, names, coded, encoding)


def sums_of(delta: Delta) -> Sums:
    """What the tensor's sums of the state digest gain by the change."""
    if delta.sums is not None:
        return delta.sums
    return state_digest.of_change(delta.box.to_whole(delta.positions), delta.old, delta.new)
