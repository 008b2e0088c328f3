"""What an engine's memory holds of a checkpoint's tensors, read back through a proven map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from deltackpt.engines.cached_steps import Steps
from deltackpt.engines.card_memory import card_of, covers, elements, unlike
from deltackpt.engines.memory import Memory
from deltackpt.engines.proof import Proof, same
from deltackpt.engines.regions import Region
from deltackpt.errors import NotFoundError, StoreError
from deltackpt.format.digests import proves
from deltackpt.format.dtypes import DTYPES, nbytes, uint
from deltackpt.format.manifest import Link
from deltackpt.format.safetensors_header import Tensor
from deltackpt.format.state_digest import TensorDigest


def read_tensor(
    regions: Sequence[Region], memory: Mapping[int, Memory], tensor: Tensor
) -> npt.NDArray[np.uint8]:  # fmt: skip
    """A whole tensor of an engine that holds all of it: [bytes] uint8 in row-major order. A view of the engine's memory
    where it lies so on the host, else a copy."""
    dtype = DTYPES[tensor.dtype]
    total = nbytes(dtype, tensor.shape) // dtype.width
    if len(regions) == 1 and (run := regions[0]).plain and run.elements == total:
        return memory[run.memory].span(run.target, total).view(np.uint8)
    words = np.empty(total, uint(dtype.width))
    for region in regions:
        storage = memory[region.memory]
        if region.plain:
            words[region.source : region.source + region.elements] = storage.span(region.target, region.elements)
        else:
            region.source_view(words)[...] = region.target_view(storage.words())
    return words.view(np.uint8)


def differing(steps: Steps, link: Link, proof: Proof, memory: Mapping[int, Memory]) -> list[str] | None:
    """The tensors whose bits in the engine are not those of a step: held against its digests on a card, else against
    its slot in the cache, or its digests where there is none. None where there is neither, as for a rank without a
    slot that holds parts of tensors."""
    table = steps.table(link)
    held = {name: regions for name, regions in proof.regions.items() if regions}
    whole = all(covers(regions, elements(table[name])) for name, regions in held.items())
    card = card_of(proof, memory) if whole else None
    if card is not None and (digests := known_digests(steps, link)) is not None:
        return unlike(card, held, memory, table, digests)
    with steps.slot(link) as slot:
        if slot is not None:
            return same(proof, memory, slot.table, slot.read)
    if not whole or (digests := known_digests(steps, link)) is None:
        return None
    return [
        name
        for name, regions in held.items()
        if not proves(read_tensor(regions, memory, table[name]), table[name].dtype, digests[name])
    ]


def known_digests(steps: Steps, link: Link) -> Mapping[str, TensorDigest] | None:
    """Of a step's tensors; None where they are not within reach: a cache may have what its store has not."""
    try:
        return steps.digests(link)
    except (NotFoundError, StoreError):
        return None
