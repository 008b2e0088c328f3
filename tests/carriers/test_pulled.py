"""Parts in one rank's memory, pulled by another: whole and by ranges, over each carrier."""

import os
import threading
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from support.live import TOKEN  # noqa: E402
from support.states import ORIGIN, part_of, random_bytes  # noqa: E402

from deltackpt.carriers.memory import PartsInMemory, spans_of  # noqa: E402
from deltackpt.carriers.pulled import ManySources, PulledParts  # noqa: E402
from deltackpt.carriers.server import PartServer  # noqa: E402
from deltackpt.carriers.wire import Deadline, Wire, error_of  # noqa: E402
from deltackpt.errors import BY_EXIT_CODE, FormatError, NotFoundError, StoreError  # noqa: E402
from deltackpt.format.manifest import File  # noqa: E402
from deltackpt.publish.sink import EncodedPart  # noqa: E402

CARRIERS = ["tcp", "gloo", "nixl"]


def part(size, number=1):
    """Bytes in pieces of odd sizes, one of them empty."""
    data = os.urandom(size)
    cuts = [0, 0, size // 3, size // 3 + 1, size]
    chunks = tuple(data[a:b] for a, b in zip(cuts, cuts[1:], strict=False))
    return data, EncodedPart(number, ORIGIN, (), chunks, size)


@pytest.fixture
def served(request):
    parts = PartsInMemory()
    server = PartServer("127.0.0.1", 0, TOKEN, parts, 30.0)
    yield parts, server
    server.close()


def pulled(server, carrier="tcp", timeout=30.0):
    if carrier == "nixl":
        pytest.importorskip("nixl_cu13")
    return PulledParts(("127.0.0.1", server.port), 0, TOKEN, carrier, timeout)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_whole_parts_and_ranges(served, carrier):
    parts, server = served
    source = pulled(server, carrier)
    total = 0
    for size in (0, 1, 1000, (17 << 20) + 5):
        data, made = part(size)
        file = parts.put(f"part-{size}", made)
        assert bytes(source.part(file)) == data
        total += size
        spans = [(0, size), (size // 2, size // 2), (size // 2, size), (0, size // 4)]
        assert [bytes(b) for b in source.ranges(file, spans)] == [data[a:b] for a, b in spans]
        total += sum(b - a for a, b in spans)
    assert source.received == total
    source.close()


class Counted(tuple):
    """Pieces of which every pass over them is counted."""

    passes = 0

    def __iter__(self):
        Counted.passes += 1
        return super().__iter__()


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted), max_size=8), st.integers(0, 2**20))
def test_any_spans(spans, seed):
    rng = np.random.default_rng(seed)
    data = rng.bytes(60)
    cuts = [0, *sorted(rng.integers(0, 61, 6).tolist()), 60]
    made = EncodedPart(1, ORIGIN, (), Counted(memoryview(data)[a:b] for a, b in pairwise(cuts)), 60)
    assert b"".join(spans_of(made, spans)) == b"".join(data[a:b] for a, b in spans)
    Counted.passes = 0
    rising = sorted(spans)
    assert b"".join(spans_of(made, rising)) == b"".join(data[a:b] for a, b in rising)
    apart = all(a[1] <= b[0] for a, b in pairwise(rising))
    assert Counted.passes <= 1 or not apart


@pytest.mark.parametrize("kind", BY_EXIT_CODE.values())
def test_an_error_that_a_peer_told_is_of_its_kind(kind):
    error = kind("a-code", where="here", have="this", need="that", hint="do so")
    found = error_of(error.to_dict(), "peer")
    assert type(found) is kind
    assert found.to_dict() == error.to_dict()
    assert type(error_of({**error.to_dict(), "exit_code": 77}, "peer")) is StoreError
    assert type(error_of({**error.to_dict(), "exit_code": [7]}, "peer")) is StoreError


@pytest.mark.parametrize("carrier", CARRIERS)
def test_what_is_not_there(served, carrier):
    parts, server = served
    source = pulled(server, carrier)
    data, made = part(1000)
    file = parts.put("part", made)
    with pytest.raises(FormatError) as error:
        source.ranges(file, [(0, 1001)])
    assert error.value.code == "object-short"
    with pytest.raises(FormatError) as error:
        source.part(File("part", 999, file.sha256))
    assert error.value.code == "object-short"
    with pytest.raises(FormatError) as error:
        source.part(File("part", 1000, "0" * 64))
    assert error.value.code == "object-hash"
    assert "trainer rank 0" in str(error.value)
    assert bytes(source.part(file)) == data  # it connects again
    parts.drop(["part"])
    with pytest.raises(NotFoundError) as missing:
        source.part(file)
    assert missing.value.code == "object-missing"
    with pytest.raises(FormatError):
        ManySources({}).part(file)
    source.close()


def test_the_damaged_tensor_is_named(served):
    parts, server = served
    rng = np.random.default_rng(0)
    state = {name: ("BF16", (64, 64), random_bytes(rng, "BF16", (64, 64))) for name in ("first", "second")}
    data = bytearray(part_of({}, state, encoding="full"))
    good = File("part", len(data), EncodedPart(1, ORIGIN, (), (bytes(data),), len(data)).sha256)
    data[-1] ^= 1
    parts.put("part", EncodedPart(1, ORIGIN, (), (bytes(data),), len(data)))
    source = pulled(server)
    with pytest.raises(FormatError) as error:
        source.part(good)
    source.close()
    assert error.value.code == "object-hash"
    assert "second" in error.value.where


def test_a_silent_publisher_costs_no_more_than_the_timeout():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = PulledParts(("127.0.0.1", silent.getsockname()[1]), 3, TOKEN, "tcp", 0.3)
        with pytest.raises(StoreError) as error:
            source.part(File("part", 1, "0" * 64))
    assert error.value.code == "live-lost"
    assert "rank 3" in error.value.where


def test_many_receivers_at_once(served):
    parts, server = served
    data, made = part(3 << 20)
    file, wrong = parts.put("part", made), []

    def one():
        source = pulled(server)
        if bytes(source.part(file)) != data:
            wrong.append(1)
        source.close()

    threads = [threading.Thread(target=one) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_bytes_that_are_on_their_way(served):
    """What was asked for is waited for when it is wanted, and before the next thing is asked for."""
    parts, server = served
    source = pulled(server, "gloo")
    size = (17 << 20) + 5
    data, made = part(size)
    file = parts.put("part", made)
    spans = [(0, 5), (5, 5), (7, size)]
    first, second = source.begin_tensors(file, spans), source.begin_tensors(file, [(1, 3)])
    assert bytes(source.ranges(file, [(2, 9)])[0]) == data[2:9]
    for _ in range(2):
        assert [bytes(t.numpy()) for t in first()] == [data[a:b] for a, b in spans]
        assert [bytes(t.numpy()) for t in second()] == [data[1:3]]
    assert source.received == size - 2 + 2 + 7
    source.close()


def test_bytes_that_do_not_arrive_are_told_each_time(served):
    parts, server = served
    source = pulled(server, "gloo")
    data, made = part(1000)
    file = parts.put("part", made)
    assert [bytes(t.numpy()) for t in source.tensors(file, [(0, 1000)])] == [data]

    def never(*_):
        raise RuntimeError("a peer that is gone")

    source._pair._receive = never
    wanted = source.begin_tensors(file, [(0, 1000)])
    for _ in range(2):
        with pytest.raises(StoreError) as error:
            wanted()
        assert error.value.code == "live-lost"
    assert [bytes(t.numpy()) for t in source.tensors(file, [(0, 1000)])] == [data]  # it connects again
    source.close()


def test_a_message_that_is_too_long_is_not_read(served):
    _, server = served
    wire = Wire.connect(("127.0.0.1", server.port), "it", Deadline(20))
    wire.receive(Deadline(20))
    wire.send_bytes([(1 << 30).to_bytes(4, "big")], Deadline(20))
    with pytest.raises(StoreError):
        wire.receive(Deadline(20))
    wire.close()
