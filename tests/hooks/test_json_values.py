"""Values that are no weights: JSON and back, the same type and the same bits."""

import math
from collections import Counter, OrderedDict

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from deltackpt.errors import CheckpointError, FormatError  # noqa: E402
from deltackpt.hooks.json_values import MOST, dumps, loads  # noqa: E402

SAME = [
    None, True, 0, -(1 << 80), 0.1, -0.0, 5e-324, math.inf, -math.inf, "", "ü\n\ud800", [], (), {},
    {"a": [1, (2.5, None)]},
    {"$float": "inf"}, {1: "a", (2, 3): "b", None: 1}, Counter({3: 2}), OrderedDict(b=1, a=2), b"\x00\xff",
    {"x": {"y": ()}},
]  # fmt: skip


@pytest.mark.parametrize("value", SAME, ids=repr)
def test_values_come_back(value):
    found = loads(dumps(value, "here"), "there")
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_nan_comes_back():
    assert math.isnan(loads(dumps([math.nan], "here"), "there")[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tensors_come_back(dtype, shape):
    tensor = torch.ones(shape, dtype=dtype)
    found = loads(dumps({"t": tensor}, "here"), "there")["t"]
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert torch.equal(found, tensor)


@pytest.mark.parametrize("array", [np.float32(1.5), np.arange(6, dtype=">i4").reshape(2, 3), np.zeros((0, 3))])
def test_arrays_come_back(array):
    found = loads(dumps(array, "here"), "there")
    assert type(found) is type(array)
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, lambda: 0, np.array([object()]), np.array(["s"]), bytes(MOST + 1), torch.float32, 1j]
)
def test_what_json_cannot_hold_is_named(value):
    with pytest.raises(CheckpointError, match="training-value") as raised:
        dumps({"a": [0, value]}, "state")
    assert raised.value.where == "state['a'][1]"


def test_what_is_too_deep_is_refused():
    deep: list[object] = []
    deep.append(deep)
    with pytest.raises(CheckpointError, match="training-value"):
        dumps(deep, "state")


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"\xff", b'{"$eval":"1"}', b'{"$float":"1e5"}', b'{"$float":3}', b'{"$tensor":["F32",[2],"AA=="]}',
        b'{"$tensor":["F32",[-1],"AAAA"]}', b'{"$tensor":[]}', b'{"$array":["O",[1],"AAAAAAAAAAA="]}',
        b'{"$array":["<f4",[3],"AAAAAA=="]}', b'{"$bytes":"?"}', b'{"$dict":[[[1],2]]}', b'{"$tuple":3}',
        b'{"$a":1,"b":2}', b'{"a":1,"a":1}', b"Infinity",
    ],
)  # fmt: skip
def test_text_that_is_none_of_ours_is_refused(text):
    with pytest.raises(FormatError, match="training-json"):
        loads(text, "there")
