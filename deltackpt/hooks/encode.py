"""A delta as a table entry of a part."""

from __future__ import annotations

from dataclasses import replace

from deltackpt.codecs import SCAN_LIMIT, Encoded, Entry, encode
from deltackpt.codecs.packed.codec import WIDTHS
from deltackpt.format import state_digest
from deltackpt.format.state_digest import Sums
from deltackpt.patch.part import collides
from deltackpt.torch_views.delta import Delta


def entry_of(
    delta: Delta, names: set[str], *, encoding: str = "auto", scan_limit: int = SCAN_LIMIT
) -> tuple[Entry, Encoded]:
    """Encode what changed; the bytes are those that `deltackpt write` makes of the same change.

    ``names``: of all tensors of the state. A change whose plain tensors would have the name of another is stored in
    `full`. Raises UsageError ``encoding-choice``.
    """
    box = delta.box
    if delta.encoded is not None:
        chosen, encoded = "packed", delta.encoded
    else:
        chosen, encoded = _encode(delta, encoding, scan_limit)
    entry = Entry(delta.name, chosen, delta.dtype, box.shape, box.whole, box.offset, encoded.detail)
    if collides(entry, names):
        chosen, encoded = _encode(delta, "full", scan_limit)
        entry = replace(entry, encoding=chosen, detail=encoded.detail)
    return entry, encoded


def _encode(delta: Delta, encoding: str, scan_limit: int) -> tuple[str, Encoded]:
    box = delta.box
    if delta.base is None:
        # `packed` of a large tensor looks at changed elements only; the others are never read.
        assert delta.dtype.width in WIDTHS
        assert not (delta.dtype.sign_magnitude and delta.elements < scan_limit)
        assert encoding in ("auto", "packed")
        encoding = "packed"
    return encode(delta.change(), box.shape, encoding, scan_limit=scan_limit, boxed=box.proper)


def sums_of(delta: Delta) -> Sums:
    """What the tensor's sums of the state digest gain by the change."""
    if delta.sums is not None:
        return delta.sums
    return state_digest.of_change(delta.box.to_whole(delta.positions), delta.old, delta.new)
