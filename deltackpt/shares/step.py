"""A step at one rank: its share is read and decoded, proven with those of all ranks, and only then written.

`stage` reads and decodes, and writes nothing. The ranks add up `StagedShare.proof`, one process compares the sum
with the step's digests, and when all agree each calls `StagedShare.write` with the report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deltackpt.codecs import Decoded
from deltackpt.codecs.types import Elements
from deltackpt.errors import ChainError
from deltackpt.format.dtypes import storage_shape
from deltackpt.patch.source import PartSource
from deltackpt.patch.tensor import check_together
from deltackpt.repository.chain import Hop
from deltackpt.restore.patch_reader import check_origin
from deltackpt.shares.needs import Cut, EntryShare
from deltackpt.shares.proof import ProofReport, ShareProof
from deltackpt.shares.reader import ShareReader, incomplete
from deltackpt.shares.tensors import HeldTensors

OldElements = Callable[[EntryShare], Elements]


@dataclass(frozen=True)
class StagedShare:
    """``changes``: a rank's new elements, tensor by tensor: flat positions in the whole tensor, int64 [n], and words
    [n]. ``proof``: the sums of what it holds once they are written. ``size``: bytes of the share, without tables.
    ``unchecked``: tensors of which runs of elements were read that have no checksum: sums alone prove them.
    """

    tensors: HeldTensors
    changes: tuple[tuple[str, Decoded], ...]
    proof: ShareProof
    size: int
    unchecked: frozenset[str]

    def write(self, report: ProofReport) -> None:
        """Put the new elements where the rank holds them; ``report`` is of the proofs of all ranks together.

        Raises ChainError ``tensor-differs``, and writes nothing, where a tensor is in no proof, or where nothing proves
        what was read of it: no rank holds some elements of it, and its bytes have no checksum.
        """
        proven, known = {*report.proven}, {*report.proven, *report.open}
        for name, _ in self.changes:
            if name not in known or (name in self.unchecked and name not in proven):
                have, need = "bytes that no checksum and no sum proves", "a proof of all ranks"
                hint = "Let some rank hold the rest of the tensor, or read it whole."
                raise ChainError("tensor-differs", where=repr(name[:80]), have=have, need=need, hint=hint)
        for name, new in self.changes:
            self.tensors.write(name, new)


def stage(
    source: PartSource, hop: Hop, tensors: HeldTensors, before: ShareProof, old: OldElements | None = None
) -> StagedShare:
    """Read and decode a rank's share of a hop's parts, and say what the rank's sums will be; nothing is written.

    ``before``: the rank's proof of the hop's start. ``old``: all old elements of an entry, for tiles of which other
    ranks hold elements too, words [elements of the entry]. Raises FormatError for bytes that do not decode, ChainError
    ``base-shape`` for tensors that the hop makes others of, or where a tile needs elements that are not at hand,
    ``part-elsewhere`` for parts of another hop, and what `PartSource.ranges` raises.
    """
    readers = [ShareReader(source, file, tensors.held) for file in hop.files]
    for reader in readers:
        check_origin(reader.index, hop)
    check_together([reader.index for reader in readers])
    changes, proof, unchecked = list[tuple[str, Decoded]](), before, set[str]()
    for reader in readers:
        where = reader.index.where
        if reader.share.removed:
            raise _other(where, reader.share.removed[0], "a tensor that goes")
        for one in reader.share.entries:
            _check(one, tensors, where)
        for one, data in reader:
            if not one.complete and old is None:
                raise incomplete(one, where)
            base = tensors.base(one) if one.complete or old is None else old(one)
            new = one.decode(data, base, where)
            name = one.entry.name
            assert new.positions is not None
            change = new.positions, tensors.old(name, new.positions), new.values
            proof = proof.after(name, tensors.tensors[name].shape, change)
            changes.append((name, new))
            unchecked |= {name} if one.cut is Cut.ELEMENTS else set()
    size = sum(reader.share.size for reader in readers)
    return StagedShare(tensors, tuple(changes), proof, size, frozenset(unchecked))


def _check(one: EntryShare, tensors: HeldTensors, where: str) -> None:
    held, entry = tensors.tensors[one.entry.name], one.entry
    shape = storage_shape(entry.dtype, entry.whole)
    if (held.dtype.name, held.shape) != (entry.dtype.name, shape):
        raise _other(where, entry.name, f"{entry.dtype.name} {list(entry.whole)}"[:120])


def _other(where: str, name: str, have: str) -> ChainError:
    hint = "The model is another one after this step: load it anew."
    where = f"{where}, {name[:80]!r}"
    return ChainError("base-shape", where=where, have=have, need="the tensor that the rank holds", hint=hint)
