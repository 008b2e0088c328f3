"""NIXL's one-sided reads between two processes: exact, in time, and no word of a peer is trusted."""

import base64
import os
import signal
import socket
import threading
import time

import pytest

pytest.importorskip("nixl_cu13")
torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from support.live import TOKEN, until  # noqa: E402
from support.live_ranks import end, noted, start  # noqa: E402
from support.one_sided import data_of, publisher  # noqa: E402

from deltackpt.carriers.one_sided import OneSided  # noqa: E402
from deltackpt.carriers.pulled import PulledParts  # noqa: E402
from deltackpt.carriers.wire import Deadline, Wire  # noqa: E402
from deltackpt.errors import FormatError, StoreError  # noqa: E402
from deltackpt.format.manifest import File  # noqa: E402

WAYS = [
    "all",
    "tcp",
]  # what UCX finds on one host, shared memory among it; and what there is between hosts without RDMA


@pytest.fixture
def published(tmp_path, monkeypatch):
    """-> a function that starts a publisher, and gives a source of its parts, and those."""
    started, sources = [], []

    def begin(way="all", how=0, after=0, timeout=60.0):
        monkeypatch.setenv("UCX_TLS", way)
        out = tmp_path / f"publisher-{len(started)}.json"
        started.append(start(publisher, str(out), how, after, {"UCX_TLS": way}))
        found = until(lambda: noted(out))
        sources.append(PulledParts(("127.0.0.1", found["port"]), 0, TOKEN, "nixl", timeout))
        return sources[-1], [File(*one) for one in found["files"]], started[-1]

    yield begin
    for source in sources:
        source.close()
    for process in started:
        end(process)


@pytest.mark.parametrize("way", WAYS)
def test_another_process_is_read_exactly(published, way):
    source, files, _ = published(way)
    for file in files:
        data = data_of(file.size)
        assert bytes(source.part(file)) == data
        spans = [(0, file.size), (file.size // 2, file.size // 2), (file.size // 3, file.size), (0, file.size // 7)]
        spans += [(0, file.size)] * 3  # the same memory, and some that overlaps
        for _ in range(2):
            assert [bytes(b) for b in source.ranges(file, spans)] == [data[a:b] for a, b in spans]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_publisher_that_is_lost_in_the_middle_of_a_read(published, how, way):
    """Whole bytes or an error within the timeout; and the other publisher is read on."""
    source, files, process = published(way, how, after=1, timeout=5.0)
    healthy, others, _ = published(way)
    large = files[-1]
    assert bytes(source.part(large)) == data_of(large.size)
    began = time.monotonic()
    with pytest.raises(StoreError) as error:
        read_twice(source, large)
    assert error.value.code == "live-lost"
    assert time.monotonic() - began < 60.0
    assert bytes(healthy.part(others[-1])) == data_of(large.size)
    if how == signal.SIGSTOP:
        os.kill(process.pid, signal.SIGCONT)

        def again():
            try:
                return bytes(source.part(large)) == data_of(large.size)
            except StoreError:
                return False

        assert until(again)


def read_twice(source, file):
    """Memory that two processes share can be read to the end of the first."""
    for _ in range(2):
        assert bytes(source.part(file)) == data_of(file.size)


def test_wrong_ranges_and_damaged_bytes(published):
    source, files, _ = published()
    file = files[1]
    with pytest.raises(FormatError) as error:
        source.ranges(file, [(0, file.size + 1)])
    assert error.value.code == "object-short"
    with pytest.raises(FormatError) as error:
        source.part(File(file.name, file.size, "0" * 64))
    assert error.value.code == "object-hash"
    assert "trainer rank 0" in error.value.where
    assert bytes(source.part(file)) == data_of(file.size)


def pair_of_wires():
    a, b = socket.socketpair()
    return Wire(a, "the publisher"), Wire(b, "the receiver")


def foreign_offers():
    """What a peer may say in the place of an agent and runs of memory that is its own, and the code of the error."""
    wire, far = pair_of_wires()
    other = OneSided(wire)

    memory = np.arange(1000, dtype=np.uint8)
    held = other._registered([(memory.ctypes.data, 1000)])
    known = base64.b64encode(other._agent.get_agent_metadata()).decode()
    at = memory.ctypes.data
    yield {}, "live-message"
    yield {"agent": 7, "runs": [[at, 1000]]}, "live-message"
    yield {"agent": "?" * 20, "runs": [[at, 1000]]}, "live-message"
    yield {"agent": "A" * (1 << 21), "runs": [[at, 1000]]}, "live-message"
    for runs in ([[at, 999]], [[at, 1001]], [[at, 500], [at, 499]], [[at, -1]], [[-1, 1000]], [[True, 1000]], None):
        yield {"agent": known, "runs": runs}, "live-message"
    yield {"agent": known, "runs": [[at, 2000], [at, -1000]]}, "live-message"
    yield {"agent": known, "runs": [[(1 << 64) - 10, 1000]]}, "live-message"
    yield {"agent": known, "runs": [[at + 1, 1000]]}, "live-lost"  # outside of what it has registered
    yield {"agent": known, "runs": [[4096, 1000]]}, "live-lost"
    yield {"agent": base64.b64encode(b"no agent at all").decode(), "runs": [[at, 1000]]}, "live-lost"
    yield {"agent": known[: len(known) // 8 * 4], "runs": [[at, 1000]]}, "live-lost"
    yield {"agent": "", "runs": [[at, 1000]]}, "live-lost"
    other._deregister(held)
    wire.close()
    far.close()


def test_a_foreign_agent_is_told():
    for offer, code in foreign_offers():
        wire, far = pair_of_wires()
        receiver, into = OneSided(wire), bytearray(1000)
        telling = threading.Thread(target=far.send, args=(offer, Deadline(20)))
        telling.start()
        with pytest.raises((FormatError, StoreError)) as error:
            receiver.receive(memoryview(into), Deadline(20))
        telling.join(60)
        assert error.value.code == code, (str(offer)[:500], error.value)
        assert into == bytes(1000)
        far.close()
        wire.close()


def test_a_receiver_that_dies_or_says_another_word():
    """The publisher lets go of what it offered."""
    for word in (None, {"read": 7}):
        wire, far = pair_of_wires()
        sending, found = OneSided(wire), []

        def send(sending=sending, found=found):
            try:
                sending.send([memoryview(bytes(1 << 20))], 1 << 20, Deadline(30))
            except (FormatError, StoreError) as error:
                found.append(error.code)

        thread = threading.Thread(target=send)
        thread.start()
        assert far.receive(Deadline(30))["runs"]
        if word is not None:
            far.send(word, Deadline(30))
        else:
            far.close()
        thread.join(60)
        assert found == ["live-lost" if word is None else "live-message"]
        wire.close()
        far.close()
