"""A delta as a table entry of a part."""

from __future__ import annotations

from deltackpt.codecs import CODECS, VERSIONS, Encoded, Entry, Registry, alone, encode
from deltackpt.codecs.packed.encoding import PackedCodec
from deltackpt.format import state_digest
from deltackpt.format.state_digest import Sums
from deltackpt.patch.encode import fitting_entry
from deltackpt.torch_views.delta import Delta


def entry_of(
    delta: Delta, names: set[str], *, encoding: str = "auto", version: int = CODECS.version
) -> tuple[Entry, Encoded]:
    """Encode what changed, for a part of ``version``; of the newest, the bytes are those that `deltackpt write` makes.

    ``names``: of all tensors of the state. A change whose plain tensors would have the name of another is stored in
    `full`. Raises UsageError ``encoding-choice``.
    """
    box = delta.box

    def coded(choice: str) -> tuple[str, Encoded]:
        if delta.encoded is not None and choice == encoding:
            return PackedCodec.name, delta.encoded
        return _encode(delta, choice, VERSIONS[version])

    return fitting_entry(delta.name, delta.dtype, box.shape, box.whole, box.offset, names, coded, encoding, version)


def _encode(delta: Delta, encoding: str, codecs: Registry) -> tuple[str, Encoded]:
    box = delta.box
    if delta.base is None:
        # Such an encoding of a large tensor looks at changed elements only; the others are never read.
        used = alone(encoding, codecs)
        assert used is not None
        assert codecs[used].takes_dtype(delta.dtype)
        encoding = used
    return encode(delta.change(), box.shape, encoding, boxed=box.proper, codecs=codecs)


def sums_of(delta: Delta) -> Sums:
    """What the tensor's sums of the state digest gain by the change."""
    if delta.sums is not None:
        return delta.sums
    return state_digest.of_change(delta.box.to_whole(delta.positions), delta.old, delta.new)
