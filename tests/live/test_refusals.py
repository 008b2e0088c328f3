"""Who may not come in, and bytes that are not the step's: refused in words, and nobody else is harmed."""

import socket
import threading
import time

import pytest

torch = pytest.importorskip("torch")

from support.live import DEADLINE, TOKEN, Engine, make_model, nudge, raw, until  # noqa: E402

from deltackpt.carriers import server  # noqa: E402
from deltackpt.carriers.handshake import introduce  # noqa: E402
from deltackpt.carriers.wire import Deadline, Wire  # noqa: E402
from deltackpt.errors import CheckpointError, ConflictError, DeltackptError, StoreError, UsageError  # noqa: E402
from deltackpt.format.manifest import Link  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.live import Session, gate, join  # noqa: E402
from deltackpt.live.options import host_and_port  # noqa: E402


def quiet(event):
    """Events of no interest."""


def made(address="127.0.0.1:0", **options):
    return Session(address, token=TOKEN, **{"mode": "sync", "timeout": 20.0, "report": quiet, **options})


@pytest.fixture
def running(tmp_path):
    model, live = make_model(), made()
    with TrainerHook(model, tmp_path / "repo", threads=1, live=live) as hook:
        hook.step(0)
        yield model, hook, live


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("address", "nowhere"), ("address", "host:port"), ("address", "host:99999"), ("address", 7700),
        ("address", "0.0.0.0:7700"),
        ("token", "short"), ("token", None), ("mode", "later"), ("durable", True), ("carrier", "pigeon"),
        ("engines", -1), ("engines", 1.5), ("timeout", 0), ("timeout", float("nan")), ("load_timeout", "1"),
        ("timeout", 10**400),
    ],
)  # fmt: skip
def test_options(option, value):
    given = {"address": "127.0.0.1:0", "token": TOKEN, option: value}
    address = given.pop("address")
    with pytest.raises(UsageError) as error:
        Session(address, **given)
    assert error.value.code == "live-option"
    assert option in str(error.value)
    assert TOKEN not in repr(Session("127.0.0.1:0", token=TOKEN).options)
    if option == "token":
        assert "short" not in error.value.have.replace("too short", "")


def test_a_hook_takes_a_session_only(tmp_path):
    with pytest.raises(UsageError) as error:
        TrainerHook(make_model(), tmp_path / "repo", live="127.0.0.1:7700")
    assert error.value.code == "hook-option"


def test_a_session_is_used_once(tmp_path, running):
    _, _, live = running
    with pytest.raises(UsageError) as error:
        TrainerHook(make_model(), tmp_path / "other", threads=1, live=live)
    assert error.value.code == "live-closed"


def test_a_second_trainer_at_the_address_is_refused(tmp_path, running):
    _, _, live = running
    with pytest.raises(ConflictError) as error:
        TrainerHook(make_model(), tmp_path / "other", threads=1, live=made(live.address))
    assert error.value.code == "live-taken"
    assert live.address in str(error.value)


def test_another_token(running):
    with pytest.raises(UsageError) as error:
        join(make_model(), running[2].address, token="another secret of somebody", timeout=20, report=quiet)
    assert error.value.code == "live-token"


def test_no_session_there():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StoreError) as error:
            join(make_model(), address, token=TOKEN, timeout=0.3, report=quiet)
    assert error.value.code == "live-lost"
    with pytest.raises(StoreError):
        join(make_model(), address, token=TOKEN, timeout=5, report=quiet)


def test_a_name_that_is_taken(running):
    model, hook, live = running
    engine = Engine(make_model(), live.address, engine="one")
    until(lambda: live.engines == 1)
    for rank, ranks in ((0, 1), (1, 2)):
        options = {"engine": "one", "rank": (rank, ranks)}
        with pytest.raises(ConflictError) as error:
            join(make_model(), live.address, token=TOKEN, timeout=20, report=quiet, **options)
        assert error.value.code == "live-taken"
    engine.close()
    again = Engine(make_model(), live.address, engine="one")
    again.reach(0)
    again.close()


def test_a_rank_that_takes_long_to_come_to_the_step_is_in(tmp_path):
    """Longer than one answer may take: all the weights may have to be read."""
    live = made(timeout=3.0)
    with TrainerHook(make_model(), tmp_path / "repo", threads=1, live=live) as hook:
        hook.step(0)
        deadline = Deadline(DEADLINE)
        wire = Wire.connect(host_and_port(live.address), "the trainer", deadline)
        introduce(wire, TOKEN, {"kind": "join", "engine": "slow", "rank": 0, "ranks": 1}, deadline)
        assert "welcome" in wire.receive(deadline)
        time.sleep(3.2)
        wire.send({"in": True}, deadline)
        assert wire.receive(deadline) == {"in": True}
        until(lambda: live.engines == 1)
        wire.close()


def test_a_rank_whose_lost_connection_the_trainer_still_waits_for(running):
    """It goes by the repository, and is in again when the trainer has let the old connection go."""
    model, hook, live = running
    receiver = join(make_model(), live.address, token=TOKEN, timeout=20, report=quiet)
    lost, receiver._wire = receiver._wire, None
    assert receiver.receive() is None
    assert "in the session" in receiver.why
    assert not receiver.connected
    lost.close()

    def back():
        receiver._retry = 0.0
        receiver.receive()
        return receiver.connected

    until(back)
    receiver.close()


def test_a_proof_that_is_no_ascii(running):
    deadline = Deadline(DEADLINE)
    wire = Wire.connect(host_and_port(running[2].address), "the trainer", deadline)
    wire.receive(deadline)
    wire.send({"kind": "join", "nonce": "n", "proof": "\u00e9"}, deadline)
    assert wire.receive(deadline)["error"]["error"] == "live-token"
    wire.close()


def test_a_step_that_is_published_while_the_gate_looks(monkeypatch):
    """It is not seen a second later."""
    monkeypatch.setattr(gate, "TICK", DEADLINE)
    made, link, threads = gate.PublishGate(), Link(1, "a" * 64), []
    verdict = made.verdict

    def slow(step, state):
        found = verdict(step, state)
        if not threads:
            threads.append(threading.Thread(target=made.published, args=(link, "state")))
            threads[0].start()
            threads[0].join(0.5)
        return found

    monkeypatch.setattr(made, "verdict", slow)
    began = time.monotonic()
    assert made.wait(1, "state", lambda: None) == link
    assert time.monotonic() - began < DEADLINE / 2
    threads[0].join()


def test_another_model(running):
    with pytest.raises(CheckpointError) as error:
        join(torch.nn.Linear(3, 3), running[2].address, token=TOKEN, timeout=20, report=quiet)
    assert error.value.code == "model-differs"


def test_half_an_engine_takes_no_step(running):
    """One rank of two is there: it stays where it is, and comes after the step by the repository."""
    model, hook, live = running
    half = Engine(make_model(), live.address, engine="two", rank=(0, 2))
    whole = Engine(make_model(), live.address, engine="one")
    until(lambda: live.engines == 2)
    nudge(model, 1)
    hook.step(1)
    whole.reach(1)
    assert half.receiver.step == 0
    other = Engine(make_model(), live.address, engine="two", rank=(1, 2))
    until(lambda: live.engines == 3)
    nudge(model, 2)
    hook.step(2)
    for engine in (half, whole, other):
        engine.reach(2)
        assert raw(engine.model) == raw(model)
        engine.close()


@pytest.mark.parametrize("foreign", [False, True])
def test_bytes_that_are_not_the_step_s(running, monkeypatch, foreign):
    """Damaged on the way to one engine: that is told by tensor and rank, and the engine comes by the repository."""
    model, hook, live = running
    spans_of, left = server.spans_of, [True]
    engine = Engine(make_model(), live.address, engine="one")
    until(lambda: live.engines == 1)

    def damaged(part, spans):
        data = bytearray(b"".join(spans_of(part, spans)))
        if left.pop() if left else False:
            data[-1 if not foreign else 9] ^= 1
        return iter([memoryview(data)])

    monkeypatch.setattr(server, "spans_of", damaged)
    nudge(model, 1)
    hook.step(1)
    engine.reach(1)
    assert raw(engine.model) == raw(model)
    assert engine.steps[-1].way in ("store", "live")
    told = [e for e in engine.events if e.kind == "left"]
    assert "trainer rank 0" in told[0].text
    assert "sha256" in told[0].text
    assert foreign or "up.weight" in told[0].text or "weight" in told[0].text
    until(lambda: live.engines == 1)
    nudge(model, 2)
    hook.step(2)
    engine.reach(2)
    assert raw(engine.model) == raw(model)
    engine.close()


def test_weights_that_other_code_wrote_to(running):
    """The step is refused by this engine, told, and all of the weights are loaded again."""
    model, hook, live = running
    engine = Engine(make_model(), live.address, engine="one")
    until(lambda: live.engines == 1)
    with torch.no_grad():
        engine.model.up.weight.add_(1)
    nudge(model, 1)
    hook.step(1)
    engine.reach(1)
    assert [e.code for e in engine.errors] == ["base-differs"]
    assert raw(engine.model) == raw(model)
    engine.close()


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\0\0\0\2{}", b"\0\0\0\4null"])
def test_strangers_at_the_door(running, data):
    """Whatever connects and speaks no protocol harms nothing."""
    model, hook, live = running
    host, _, port = live.address.partition(":")
    with socket.create_connection((host, int(port)), 20) as stranger:
        stranger.sendall(data)
        engine = Engine(make_model(), live.address)
        until(lambda: live.engines == 1)
        nudge(model, 1)
        hook.step(1)
        engine.reach(1)
        engine.close()


def test_a_writer_that_fails_goes_back(running):
    """An engine that cannot pause: the error is its own, it leaves the session, and comes back."""
    model, hook, live = running
    mine = make_model()
    receiver = join(mine, live.address, token=TOKEN, timeout=20, report=quiet)
    until(lambda: live.engines == 1)
    nudge(model, 1)

    def broken():
        raise RuntimeError("busy")

    import threading

    thread = threading.Thread(target=hook.step, args=(1,))
    thread.start()
    with pytest.raises(RuntimeError, match="busy"):
        until(lambda: receiver.receive(0.1, pause=broken))
    assert receiver.step == 0
    thread.join(60)
    until(lambda: receiver.receive(0.1) or receiver.step == 1)
    assert raw(mine) == raw(model)
    receiver.close()
    with pytest.raises(UsageError):
        receiver.receive()
    assert issubclass(UsageError, DeltackptError)
