"""A delta as a table entry of a part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from deltackpt.codecs import DENSE, Encoded, Entry, alone, encode, parse_choice
from deltackpt.codecs.packed import codec as packed
from deltackpt.codecs.packed.encoding import PackedCodec
from deltackpt.codecs.packed.jobs import EncodeJob
from deltackpt.codecs.select import AUTO
from deltackpt.format import state_digest
from deltackpt.format.dtypes import storage_shape
from deltackpt.format.state_digest import Sums
from deltackpt.patch.encode import fitting_entry
from deltackpt.torch_views.delta import Delta
from deltackpt.util.grouped import grouped

TOGETHER = 1 << 20  # changed elements, and elements, of deltas that are encoded in one call; and how many at most
MOST = 512


def batches(deltas: Iterable[Delta]) -> Iterator[list[Delta]]:
    """The deltas in runs of a bounded size; a larger one is alone."""
    return grouped(deltas, lambda delta: delta.elements, TOGETHER, MOST)


def encode_together(deltas: Sequence[Delta], encoding: str) -> list[Delta]:
    """The same deltas, those of them ``encoded`` that `entry_of` would encode as `packed`: all by one call."""
    encoding, shares = parse_choice(encoding)
    if encoding not in (AUTO, PackedCodec.name):
        return list(deltas)
    which = [i for i, delta in enumerate(deltas) if _fits(delta, encoding)]
    jobs = []
    for delta in (deltas[i] for i in which):
        shape = storage_shape(delta.dtype, delta.box.shape)
        positions = delta.positions.astype(np.int64)
        jobs.append(EncodeJob(positions, delta.old, delta.new, delta.base, delta.dtype, shape, shares))
    made = list(deltas)
    for i, (index, payload) in zip(which, packed.encode_many(jobs) if jobs else [], strict=True):
        encoded, whole = Encoded(index, (payload,)), deltas[i].elements * deltas[i].dtype.width
        if encoding != AUTO or encoded.size + len(index.to_bytes()) < whole:
            made[i] = replace(deltas[i], encoded=encoded)
    return made


def _fits(delta: Delta, encoding: str) -> bool:
    """Is `packed` what is wanted, whatever else there is, unless it turns out larger than the tensor?"""
    n = len(delta.positions)
    return (
        delta.encoded is None
        and delta.base is not None
        and n > 0
        and _PACKED.takes_dtype(delta.dtype)
        and (encoding != AUTO or n * DENSE <= delta.elements)
    )


_PACKED = PackedCodec()


def entry_of(delta: Delta, names: set[str], *, encoding: str = "auto") -> tuple[Entry, Encoded]:
    """Encode what changed, unless it is; the bytes are those that `deltackpt write` makes, or, of a delta that has not
    kept anything of the old words, those of one class.

    ``names``: of all tensors of the state. A change whose plain tensors would have the name of another is stored in
    `full`. Raises UsageError ``encoding-choice``.
    """
    box = delta.box

    def coded(choice: str) -> tuple[str, Encoded]:
        if delta.base is not None:
            if delta.encoded is not None and choice == encoding:
                return PackedCodec.name, delta.encoded
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
