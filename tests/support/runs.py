"""States as runs of tensors, and what a patch makes of one, tensor by tensor."""

import numpy as np

from deltackpt.errors import DeltackptError
from deltackpt.format.layout import TensorsByName
from deltackpt.format.safetensors_header import Tensor, build_header, parse_header
from deltackpt.patch.apply import decode_step
from deltackpt.patch.many import TensorRun


def run_of(state) -> TensorRun:
    """All tensors of a state side by side."""
    tensors, at = [], 0
    for name, (dtype, shape, data) in state.items():
        tensors.append(Tensor(name, dtype, shape, at, at + len(data)))
        at += len(data)
    named = TensorsByName.of([parse_header(build_header(tensors, {}), None, "a run")])
    data = np.frombuffer(bytearray(b"".join(data for *_, data in state.values())), np.uint8)
    return TensorRun(tensors, data, named)


def one_by_one(patch, run: TensorRun) -> bytes | None:
    """The run after the patch; None where a tensor gets another form, or has a defect."""
    made = []
    for i, tensor in enumerate(run.tensors):
        data = run.bytes_of(i).copy()
        if (found := patch.tensor(tensor.name)) is not None:
            try:
                decoded = decode_step(data, (tensor.dtype, tensor.shape), found)
            except DeltackptError:
                return None
            if decoded is None:
                return None
            decoded.write_to(data.view(decoded.values.dtype))
        made.append(data.tobytes())
    return b"".join(made)
