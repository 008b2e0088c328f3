"""Nothing is compiled in the middle of a training or an update: what is launched then was compiled ahead.

What Triton's caches would be asked for is computed beside the interpreter, for a card: no card is needed.
"""

import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.device_changes import case, check  # noqa: E402
from support.lists import pair  # noqa: E402

from deltackpt.codecs import select  # noqa: E402
from deltackpt.codecs.packed import codec  # noqa: E402
from deltackpt.format.dtypes import DTYPES  # noqa: E402
from deltackpt.gpu import compile_rounds, decode, diff, digest, encode, pipeline  # noqa: E402
from deltackpt.gpu.box_digest import sums_of_boxes  # noqa: E402
from deltackpt.gpu.compile_rounds import capture_round, receive_round  # noqa: E402
from deltackpt.gpu.decode import DecodeTask, TaskGroup, decode_groups  # noqa: E402
from deltackpt.gpu.kept import LateWords  # noqa: E402
from deltackpt.gpu.places import Place, by_width, other  # noqa: E402
from deltackpt.gpu.plain import PlainWords, look_at  # noqa: E402
from deltackpt.torch_views.boxes import Box  # noqa: E402
from deltackpt.torch_views.words import from_host  # noqa: E402

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it asks the interpreter")
if not torch.cuda.is_available():
    from support.kernel_keys import jitted, kernels, launched

TRITON = Path(compile_rounds.__file__).parent / "triton"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_card(monkeypatch):
    for module in (digest, pipeline):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)
    monkeypatch.setattr(compile_rounds, "SHAPE", (32, 64))
    monkeypatch.setattr(select, "SMALL", 0)


def apart(monkeypatch, host):
    """Whether snapshots are taken to be in another memory than the weights."""
    for module in (diff, encode, pipeline):
        monkeypatch.setattr(module, "apart", lambda snapshot, piece: host)


def ahead_of_capture(name, host, monkeypatch):
    apart(monkeypatch, host)
    with launched() as found:
        capture_round(CPU, DTYPES[name], host=host)
    return found


def ahead_of_receiving(name):
    with launched() as found:
        receive_round(CPU, DTYPES[name])
    return found


def missing(found, ahead):
    return sorted(f"{module}.{name}: {key}" for module, name, key in found - ahead)


def test_every_kernel_is_compiled_ahead(monkeypatch):
    found = ahead_of_receiving("BF16")
    for host in (False, True):
        found |= ahead_of_capture("BF16", host, monkeypatch)
    assert {(module, name) for module, name, _ in found} == kernels(TRITON)
    sources = {path.stem: path.read_text() for path in TRITON.glob("*.py")}
    for module, name in jitted(TRITON) - kernels(TRITON):  # called by others
        calls = sum(len(re.findall(rf"\b{name}\(", text)) for text in sources.values())
        assert calls > 1, f"{module}.{name} is neither launched nor called"


@pytest.mark.heavy
@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("name", ["BF16", "F32"])
def test_a_step_compiles_nothing(name, host, monkeypatch):
    """Whatever number of tensors, of tiles, of changes; of any alignment."""
    ahead = ahead_of_capture(name, host, monkeypatch)
    with launched() as found:
        for count in (1, 2, 16):
            shapes = [(6 + i % 2, 33 - i) for i in range(count)]
            check(*case([(name, shape, 0.1) for shape in shapes], host=host))
        pieces, olds, news, snapshot = case([(name, (7, 9), 0.5)] * 2, host=host)
        odd = torch.empty(64, dtype=pieces[0].tensor.dtype)[1:].view(7, 9).copy_(pieces[0].tensor)
        object.__setattr__(pieces[0], "tensor", odd)
        check(pieces, olds, news, snapshot)
        digest.sums_of_pieces(pieces)
    assert missing(found, ahead) == []


def group_of(name, cases):
    """Some tensors of a part whose bytes begin anywhere."""
    data, tasks = b"\1\2\3", []
    for shape, old, new in cases:
        at = np.flatnonzero(old != new)
        index, tiles = codec.encode(at, old[at], new[at], old, DTYPES[name], shape)
        words = from_host(old if old.itemsize == 1 else old.view(f"<i{old.itemsize}"), "cpu")
        payload = b"".join(tiles)
        tasks.append(DecodeTask(index, DTYPES[name], words, len(data), len(payload), "here"))
        data += payload
    held = torch.zeros(len(data) + -len(data) % 4, dtype=torch.uint8)
    held[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return TaskGroup(tasks, held)


@pytest.mark.parametrize(
    "name", ["BF16", *(pytest.param(n, marks=pytest.mark.heavy) for n in ("F32", "F8_E4M3", "U8"))]
)
def test_an_update_compiles_nothing(name, monkeypatch):
    """Whatever number of tensors, tiles and changes; wherever tensors begin. What is launched does not depend on what
    kernels find, so that they need not run."""
    ahead = ahead_of_receiving(name)
    monkeypatch.setattr(decode, "_refuse", lambda *_: None)
    with launched(run=False) as found:
        for count in (1, 2, 3, 15, 16, 17, 32):
            shapes = [(8 + i % 3, 21 + i) for i in range(count)]
            group = group_of(name, [(s, *pair(name, s, i, 200, "weights")) for i, s in enumerate(shapes)])
            (decoded,) = decode_groups([group])
            for write in (decoded.placed(), LateWords(decoded, group)):
                write.apply()
                write.revert()
            words = torch.arange(64 * count + 36, dtype=group.tasks[0].words.dtype)
            at = torch.tensor([0, 3, 7])
            places = [Place(words, i, at, words[i : i + 3], words[i + at]) for i in range(count)]
            for made in by_width(places):
                other(places, made)
                made.apply()
                made.revert()
            digest.sums_of_runs([(words[i:], 0) for i in range(count)])
            box = Box((4, 16), (0, 8), (4, 8))
            sums_of_boxes([(words[i : i + 32].view(4, 8), box) for i in range(count)])
            plain = [PlainWords(words[i : i + 8], at.int(), words[i : i + 3].clone()) for i in range(count)]
            look_at(plain).write.apply()
            held = torch.arange(9, dtype=torch.int32)
            look_at([PlainWords(words, held[i : i + 3], words[:3].clone()) for i in range(3)])
        digest.sums_of_runs([(words, 0), (words[:0], 0)])
        digest.of_run(words, 4096)
    assert missing(found, ahead) == []


def test_an_address_that_is_no_multiple_of_16_is_seen():
    """The test above would see it."""
    words = torch.arange(9, dtype=torch.int16)
    (made,) = by_width([Place(words, 0, torch.tensor([1]), words[:1], words[:1])])
    with launched() as found:
        made.put(made.fetched())
        made.positions = torch.arange(9, dtype=torch.int32)[1:2]
        made.put(made.fetched())
    assert len(found) == 4
