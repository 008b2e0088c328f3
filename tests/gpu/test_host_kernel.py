"""Launches that are alike go to one compiled kernel: what is alike for us has to be alike for Triton."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.device_changes import WHERE, torch
from support.kernel_keys import BACKEND
from triton.runtime.jit import JITFunction, create_function_from_signature

from deltackpt.gpu.triton import crc, host_kernel

EDGES = [0, 1, 2, 15, 16, 17, 32, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), -(2**31) - 16, 2**63 - 1, 2**63]
NUMBERS = st.sampled_from(EDGES) | st.integers(-(2**40), 2**64 - 1)


def one(argument):
    pass


def of_triton(argument):
    kernel = JITFunction(one)
    return create_function_from_signature(kernel.signature, kernel.params, BACKEND)(argument)[1]


def kind(argument):
    return host_kernel.kind_of(argument, host_kernel.plain_of(argument))


def tensor(dtype, offset):
    return torch.zeros(64, dtype=torch.uint8)[offset * 8 : 32 + offset * 8].view(dtype)


TENSORS = st.builds(tensor, st.sampled_from([torch.int32, torch.int64, torch.int16, torch.uint8]), st.integers(0, 3))


@given(NUMBERS | TENSORS | st.booleans() | st.none(), NUMBERS | TENSORS | st.booleans() | st.none())
def test_arguments_of_one_kind_are_compiled_for_alike(a, b):
    if kind(a) == kind(b):
        assert of_triton(a) == of_triton(b)


def test_of_neighbors_each_has_a_kind_of_its_own_where_triton_tells_them_apart():
    for a in EDGES:
        for b in EDGES:
            if of_triton(a) != of_triton(b):
                assert kind(a) != kind(b), (a, b)


@pytest.mark.skipif(WHERE != "cuda", reason="needs a card")
def test_a_second_launch_does_not_ask_triton(monkeypatch):
    data = torch.from_numpy(np.arange(4096, dtype=np.uint8)).to(WHERE)
    addresses, sizes = (torch.tensor(x, dtype=torch.int64, device=WHERE) for x in ([0, 1000], [1000, 3096]))
    first = crc.checksums(data, addresses, sizes)
    monkeypatch.setattr(JITFunction, "run", None)
    again = crc.checksums(data, addresses, sizes)
    assert torch.equal(first, again)
