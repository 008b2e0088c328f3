"""A step received from any source: the state that is there, with the patches after it applied, proven tensor by tensor.

Nothing here knows a repository or a directory: `deltackpt.patch.source.StepSource` is all that is asked.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from deltackpt.checkpoint.diff import State
from deltackpt.errors import FormatError
from deltackpt.format.digests import state_of
from deltackpt.format.manifest import Link
from deltackpt.patch.source import StepSource
from deltackpt.restore.materialize import check_tensor
from deltackpt.restore.patch_reader import PatchReader
from deltackpt.restore.replay import Replay, check_left_over
from deltackpt.restore.source import hops_between


def receive(source: StepSource, base: State, start: Link, end: Link) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
    """Every tensor of the step ``end``: its name and its bytes (uint8, one dimension), in order of the names' bytes.

    ``base`` is the state of the step ``start``; it is not written to. All parts are fetched and proven before the first
    tensor is rebuilt. Each tensor is proven by its digest before it is yielded, and the digests by the state digest of
    the step's record. Raises ChainError ``chain-broken``, ``base-shape``, ``tensor-shape``, ``tensor-differs``;
    FormatError ``object-hash``, ``digests-shape``, ``state-differs``, and others for parts that do not decode; what the
    source raises.
    """
    hops = hops_between(source, start, end)
    record, layout, digests = source.step(end), source.layout(end), source.digests(end)
    where = f"step {end.step}, {source.url}"
    if digests.keys() != layout.tensors.keys():
        need = "one for every tensor of the layout"
        raise FormatError("digests-shape", where=where, have="digests of other tensors", need=need)  # [F-DOBJ-1]
    if (found := state_of(layout, digests)) != record.state:  # [F-DOBJ-2]
        need = f"state digest {record.state}"
        raise FormatError("state-differs", where=where, have=found, need=need)
    with PatchReader.open_all(source, hops) as patches:
        check_left_over(base.tensors, patches, layout)
        state = Replay(base, patches, layout)
        for name in layout.tensors:
            data = state.bytes_of(name)
            check_tensor(name, data, digests, layout)
            yield name, data
            state.release(name)
