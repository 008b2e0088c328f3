"""spec/LIVE.md: a rank made from its words alone, and a test of each of its rules."""

import hashlib
import hmac
import json
import re
import secrets
import socket
import threading

import pytest
from support.vectors import ROOT

torch = pytest.importorskip("torch")

from support.live import TOKEN, make_model, nudge, until  # noqa: E402

from deltackpt.carriers.handshake import PROTOCOL, introduce  # noqa: E402
from deltackpt.carriers.wire import MAX_MESSAGE, Deadline, Wire  # noqa: E402
from deltackpt.errors import FormatError  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.live import Session  # noqa: E402
from deltackpt.live.messages import Announcement, Welcome  # noqa: E402

TEXT = (ROOT / "spec/LIVE.md").read_text()
HERE = "spec/test_live_protocol.py"
SHOWN_BY = {
    "L-MSG-1": "carriers/test_pulled.py::test_a_message_that_is_too_long_is_not_read",
    "L-MSG-2": f"{HERE}::test_what_nobody_knows_is_left_out_of_account",
    "L-MSG-3": "carriers/test_pulled.py::test_a_silent_publisher_costs_no_more_than_the_timeout",
    "L-HEL-1": f"{HERE}::test_another_version_is_not_talked_to",
    "L-HEL-2": f"{HERE}::test_a_nonce_is_new_each_time",
    "L-HEL-3": "live/test_refusals.py::test_another_token",
    "L-JOIN-1": "live/test_refusals.py::test_a_name_that_is_taken",
    "L-JOIN-2": "live/test_refusals.py::test_another_model",
    "L-STEP-1": f"{HERE}::test_an_announcement_that_is_none",
    "L-STEP-2": "live/test_refusals.py::test_bytes_that_are_not_the_step_s",
    "L-STEP-3": "live/test_live_faults.py::test_the_trainer_is_lost_at_every_phase",
    "L-STEP-4": "live/test_refusals.py::test_half_an_engine_takes_no_step",
    "L-STEP-5": "live/test_one_truth.py::test_a_step_that_is_not_durable_does_not_go_live",
    "L-STEP-6": "live/test_live_cuts.py::test_a_link_that_is_cut_at_every_phase",
    "L-STEP-7": f"{HERE}::test_a_rank_of_the_words_alone",
    "L-STEP-8": "live/test_live_faults.py::test_an_engine_rank_is_lost_at_every_phase",
    "L-PART-1": f"{HERE}::test_sizes_that_were_not_asked_for",
    "L-PART-2": f"{HERE}::test_a_rank_of_the_words_alone",
    "L-SIG-1": "live/test_live_trust.py::test_what_was_not_signed_is_not_taken_from_a_session",
}


class Peer:
    """The other end of a connection, by the words of the document."""

    def __init__(self, address, token=TOKEN, **hello):
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), 20)
        greeting, nonce = self.receive(), secrets.token_hex(16)
        assert greeting["deltackpt-live"] == 2
        self.nonce = greeting["nonce"]

        def proof(side):
            text = f"{side} {self.nonce} {nonce} {hello['kind']}"
            return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()

        self.send(**hello, nonce=nonce, proof=proof("client"))
        assert self.receive() == {"proof": proof("server")}

    def send(self, **message):
        data = json.dumps(message).encode()
        self.socket.sendall(len(data).to_bytes(4, "big") + data)

    def bytes(self, count):
        data = b""
        while len(data) < count:
            data += (more := self.socket.recv(count - len(data)))
            assert more
        return data

    def receive(self):
        return json.loads(self.bytes(int.from_bytes(self.bytes(4), "big")))


@pytest.fixture
def connect():
    """Makes peers, and ends their connections."""
    made = []

    def peer(address, **hello):
        made.append(Peer(address, **hello))
        return made[-1]

    yield peer
    for peer in made:
        peer.socket.close()


@pytest.fixture
def running(tmp_path):
    model = make_model()
    live = Session("127.0.0.1:0", token=TOKEN, mode="sync", timeout=20.0, report=lambda event: None)
    with TrainerHook(model, tmp_path / "repo", threads=1, live=live) as hook:
        hook.step(0)
        yield model, hook, live


def fields(title):
    """The first column of the table of a message's fields."""
    rows = TEXT.partition(f"| {title} | value |\n| --- | --- |\n")[2].partition("\n\n")[0].splitlines()
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_a_rank_of_the_words_alone(running, connect):
    model, hook, live = running
    rank = connect(live.address, kind="join", engine="by hand", rank=0, ranks=1)
    welcome = rank.receive()["welcome"]
    assert welcome.keys() == fields("field of a welcome")
    assert welcome["step"] == 0
    assert welcome["sums"].keys() == {name for name, *_ in welcome["table"]}
    rank.send(**{"in": True})
    assert rank.receive() == {"in": True}
    nudge(model, 1)
    publishing = threading.Thread(target=hook.step, args=(1,))
    publishing.start()
    step = rank.receive()["announce"]
    assert step.keys() == fields("field of an announcement")
    assert (step["step"], step["base"]) == (1, welcome["state"])
    [[name, size, sha256, _, host, port, *_]] = step["parts"]
    puller = connect(f"{host}:{port}", kind="pull")
    for asked in ([[0, size + 1]], [[-1, 4]], "all"):
        puller.send(part=name, spans=asked)
        assert "error" in puller.receive()
    puller.send(part="another", spans=None)
    assert "error" in puller.receive()
    puller.send(part=name, spans=[[8, 9], [0, 8]])
    assert puller.receive() == {"sizes": [1, 8], "near": []}
    ends = puller.bytes(9)
    puller.send(part=name, spans=None)
    assert puller.receive() == {"sizes": [size], "near": []}
    data = puller.bytes(size)
    assert hashlib.sha256(data).hexdigest() == sha256
    assert ends == data[8:9] + data[:8]
    rank.send(round=step["round"] - 1, vote="refused", error={})  # of a round that is over
    rank.send(round=step["round"], vote="ready", proof={}, unchecked=[], later=1)
    while (word := rank.receive()).keys() == {"hold"}:
        assert word == {"hold": step["round"]}
    assert word == {"write": step["round"], "state": step["state"]}
    rank.send(round=step["round"], written=step["state"])
    publishing.join(20)
    assert connect(live.address, kind="ask").receive() == {"step": 1, "state": step["state"]}
    nudge(model, 2)
    publishing = threading.Thread(target=hook.step, args=(2,))
    publishing.start()
    step = rank.receive()["announce"]
    rank.send(round=step["round"], vote="behind", why="not today")
    while (word := rank.receive()).keys() == {"hold"}:
        pass
    assert word == {"live": 2, "state": step["state"]}
    publishing.join(20)
    until(lambda: live.engines == 1)


def test_the_example_of_a_proof():
    given = dict(re.findall(r"^([PQ]) = ([0-9a-f]{64})$", TEXT, re.MULTILINE))
    token, a, b = re.findall(r"`([^`]+)`", TEXT.partition("With the token ")[2])[:3]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        told = [{"deltackpt-live": PROTOCOL, "nonce": a}, {"proof": given["Q"]}]
        for message in told:
            data = json.dumps(message).encode()
            theirs.sendall(len(data).to_bytes(4, "big") + data)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(secrets, "token_hex", lambda size: b)
            introduce(Wire(ours, "a test"), token, {"kind": "join"}, Deadline(5))
        assert json.loads(theirs.recv(4096)[4:])["proof"] == given["P"]


@pytest.mark.parametrize("greeting", [{"deltackpt-live": 1, "nonce": "a"}, {"deltackpt-live": 3}, {"nonce": "a"}])
def test_another_version_is_not_talked_to(greeting):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        data = json.dumps(greeting).encode()
        theirs.sendall(len(data).to_bytes(4, "big") + data)
        with pytest.raises(FormatError, match="live-message"):
            introduce(Wire(ours, "a test"), TOKEN, {"kind": "join"}, Deadline(5))
        ours.close()
        assert theirs.recv(1) == b""  # nothing was said


def test_a_nonce_is_new_each_time(running, connect):
    found = [connect(running[2].address, kind="ask").nonce for _ in range(3)]
    assert len({*found}) == 3
    assert all(re.fullmatch("[0-9a-f]{32,}", nonce) for nonce in found)


STEP = {
    "round": 1, "step": 2, "repository": "a" * 32, "parent": "b" * 64, "base": "c" * 64, "state": "d" * 64,
    "parts": [["part", 90, "e" * 64, 0, "host", 7700, 20, 40, 60]], "sums": {"w": "0" * 32}, "time": 0,
    "signature": None,
}  # fmt: skip
WELCOME = {
    "repository": "repo", "ref": "main", "table": [["w", "BF16", [2, 3], 12]], "step": 0, "state": "d" * 64,
    "sums": {"w": "0" * 32}, "carrier": "tcp", "milliseconds": [1000, 2000],
}  # fmt: skip


def test_what_nobody_knows_is_left_out_of_account():
    assert Announcement.of({**STEP, "later": [1]}, "a test") == Announcement.of(STEP, "a test")
    assert Welcome.of({**WELCOME, "later": [1]}, "a test") == Welcome.of(WELCOME, "a test")
    assert Announcement.of(STEP, "a test").to_dict() == STEP
    assert Welcome.of(WELCOME, "a test").to_dict() == WELCOME


@pytest.mark.parametrize(
    "wrong",
    [
        *({name: None} for name in STEP if name != "signature"), {"base": "C" * 64}, {"repository": "a" * 64},
        {"parts": STEP["parts"] * ((1 << 16) + 1)}, {"parts": [[*STEP["parts"][0][:8], 91]]},
        {"parts": [[*STEP["parts"][0][:6], 50, 40, 60]]}, {"sums": {"w": "0"}}, {"signature": ["a", "b"]},
    ],
    ids=str,
)  # fmt: skip
def test_an_announcement_that_is_none(wrong):
    with pytest.raises(FormatError, match="live-message"):
        Announcement.of({**STEP, **wrong}, "a test")


def test_sizes_that_were_not_asked_for(running, monkeypatch):
    from deltackpt.carriers.pulled import PulledParts
    from deltackpt.format.manifest import File

    monkeypatch.setattr(Wire, "receive", lambda self, *_: {"sizes": [7], "near": []})
    monkeypatch.setattr("deltackpt.carriers.pulled.introduce", lambda *_: None)
    host, _, port = running[2].address.rpartition(":")
    pulled = PulledParts((host, int(port)), 0, TOKEN, "tcp", 5.0)
    with pytest.raises(FormatError, match="object-short"):
        pulled.ranges(File("part", 8, "f" * 64), [(0, 8)])
    pulled.close()


def test_the_document_says_the_version_and_the_limits():
    assert TEXT.startswith(f"# The live session, version {PROTOCOL}\n")
    assert f"{MAX_MESSAGE:,} bytes" in TEXT


def test_every_rule_has_a_test():
    rules = re.findall(r"^- \*\*\[(L-[A-Z]+-\d+)\]\*\* ", TEXT, re.MULTILINE)
    assert len(rules) == len({*rules})
    assert {*rules} == SHOWN_BY.keys()
    for rule, test in SHOWN_BY.items():
        file, _, name = test.partition("::")
        assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(), rule
