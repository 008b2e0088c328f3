"""The kernels decode what the host decodes; without a GPU they run in the interpreter."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.device_changes import WHERE  # noqa: E402
from support.lists import job_of, pair  # noqa: E402

from deltackpt.codecs.packed import codec, grid  # noqa: E402
from deltackpt.format import state_digest  # noqa: E402
from deltackpt.format.dtypes import DTYPES, uint  # noqa: E402
from deltackpt.gpu.decode import DecodeTask, decode, takes  # noqa: E402
from deltackpt.torch_views.words import from_host  # noqa: E402

pytest.importorskip("triton")


def task_of(dtype, old, index, payload, begin=0):
    words = from_host(old.view(f"<i{old.itemsize}") if old.itemsize > 1 else old, WHERE)
    return DecodeTask(index, DTYPES[dtype], words, begin, len(payload), "here")


def encoded(dtype, shape, old, new):
    at = np.flatnonzero(old != new)
    index, tiles = codec.encode(at, old[at], new[at], old, DTYPES[dtype], shape)
    return index, b"".join(tiles)


def check(cases):
    data, tasks = b"", []
    for dtype, shape, old, new in cases:
        index, payload = encoded(dtype, shape, old, new)
        tasks.append(task_of(dtype, old, index, payload, len(data)))
        data += payload
    assert all(takes(task) for task in tasks)
    part = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(WHERE)
    found = list(decode(tasks, part))
    for group in found:
        group.write()
    for task, (dtype, _, _, new) in zip(tasks, cases, strict=True):
        assert np.array_equal(task.words.cpu().numpy().view(new.dtype), new)
    for group in found:
        group.undo()
    for task, (_, _, old, _) in zip(tasks, cases, strict=True):
        assert np.array_equal(task.words.cpu().numpy().view(old.dtype), old)
    sums = [both for group in found for both in group.sums]
    for both, (_, _, old, new) in zip(sums, cases, strict=True):
        assert state_digest.add(state_digest.of_run(old), both) == state_digest.of_run(new)


SHAPES = [(7,), (90, 70), (4, 40, 50), (64, 96)]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F8_E4M3", "U8", "I32"])
@pytest.mark.parametrize(("permille", "kind"), [(150, "weights"), (200, "any"), (700, "weights"), (1000, "same")])
def test_what_the_host_encoded(dtype, permille, kind):
    check([(dtype, shape, *pair(dtype, shape, i, permille, kind)) for i, shape in enumerate(SHAPES)])
