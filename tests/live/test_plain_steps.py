"""Steps of plain changes, from a trainer's card to an engine's, in one go: what the way for all parts comes to."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.device_changes import WHERE  # noqa: E402 isort:skip

pytest.importorskip("triton")  # after its mode is set, in the line above


from deltackpt.codecs import Encoded  # noqa: E402
from deltackpt.codecs.types import PlainTensor  # noqa: E402
from deltackpt.engines.module import WeightPlace  # noqa: E402
from deltackpt.errors import FormatError  # noqa: E402
from deltackpt.format import state_digest  # noqa: E402
from deltackpt.format.dtypes import DTYPES  # noqa: E402
from deltackpt.hooks.late_deltas import on_card  # noqa: E402
from deltackpt.live import plain_card  # noqa: E402
from deltackpt.live.card_part import ArrivingPart, CardPart  # noqa: E402
from deltackpt.live.plain_card import PlainSteps  # noqa: E402
from deltackpt.live.plain_part import PlainParts  # noqa: E402
from deltackpt.patch.part import NOWHERE, Origin, PartWriter  # noqa: E402
from deltackpt.patch.tensor import PartsPatch  # noqa: E402
from deltackpt.torch_views.boxes import Box  # noqa: E402
from deltackpt.torch_views.delta import CardChange, CardWords, Delta  # noqa: E402
from deltackpt.torch_views.words import INTS  # noqa: E402

ORIGIN = Origin("0" * 32, 3, "1" * 64, "2" * 64)
MIXED = {
    "a": ("BF16", (50, 70)),
    "b": ("F32", (30,)),
    "c": ("U8", (500,)),
    "d": ("BF16", (9,)),
    "e": ("F64", (5,)),
    "f": ("F32", (2500,)),
}
ALIKE = {"norm": ("BF16", (60,)), "w1": ("BF16", (70, 70)), "w2": ("BF16", (3000,))}


def words_of(shapes, seed=0):
    rng = np.random.default_rng(seed)
    made = {}
    for name, (dtype, shape) in shapes.items():
        width, n = DTYPES[dtype].width, int(np.prod(shape))
        made[name] = torch.from_numpy(rng.integers(0, 256, n * width).astype(np.uint8)).to(WHERE).view(INTS[width])
    return made


def steps(shapes, words):
    places = {}
    for name, (dtype, shape) in shapes.items():
        places[name] = WeightPlace(name, words[name], DTYPES[dtype], shape, shared=False)
    return PlainSteps(places, words)


def changed(shapes, words, seed=1, without=()):
    rng = np.random.default_rng(seed)
    found = {}
    for name, (dtype, shape) in reversed(shapes.items()):
        n, width = words[name].numel(), DTYPES[dtype].width
        at = np.sort(rng.choice(n, max(1, n // 3), replace=False)).astype(np.int32)
        new = rng.integers(0, 256, len(at) * width).astype(np.uint8).view(f"u{width}")
        old = words[name].cpu().numpy().view(f"u{width}")[at]
        card = CardWords(
            torch.from_numpy(at).to(WHERE), torch.from_numpy(new.view(np.uint8)).to(WHERE).view(INTS[width])
        )
        sums = state_digest.of_change(at.astype(np.int64), old, new)
        box, on_card = Box(shape, (0,) * len(shape), shape), CardChange(card)
        if name not in without:
            at = at.view(np.uint32)
            found[name] = Delta(name, DTYPES[dtype], box, at, old, new, None, None, n, sums=sums, on_card=on_card)
    return found


def bytes_of(part):
    return b"".join(chunk if isinstance(chunk, bytes) else bytes(chunk.to_host()) for chunk in part.chunks)


def arriving(data, near):
    head, start, end = near
    spans = [(head, start), (end, len(data))]
    held = [torch.frombuffer(bytearray(data[a:b] or b"\0"), dtype=torch.uint8)[: b - a].to(WHERE) for a, b in spans]
    return ArrivingPart("part", len(data), data[:head], data[start:end], spans, lambda: held)


def applied(changes, deltas, words):
    """Write, and compare; then undo."""
    assert {name for one in changes for name in one.gained} == deltas.keys()
    before = {name: one.clone() for name, one in words.items()}
    for one in changes:
        for name, gain in one.gained.items():
            assert gain == deltas[name].sums
        one.write.apply()
    for name, one in words.items():
        want = before[name].cpu().numpy().copy()
        if name in deltas:
            want[deltas[name].positions] = deltas[name].new.view(want.dtype)
        assert one.cpu().numpy().tobytes() == want.tobytes()
    for one in reversed(changes):
        one.write.revert()
    assert all(torch.equal(one, before[name]) for name, one in words.items())


@pytest.mark.parametrize("shapes", [MIXED, ALIKE], ids=["mixed", "alike"])
def test_a_step_there(shapes):
    words = words_of(shapes)
    made, there = PlainParts(), steps(shapes, words)
    for seed in (1, 2):
        deltas = changed(shapes, words, seed)
        assert made.takes(on_card(deltas), set(shapes))
        part, share = made.made(on_card(deltas), ORIGIN, 1)
        assert share.sums == {name: delta.sums for name, delta in deltas.items()}
        assert share.changed == {name: len(delta.positions) for name, delta in deltas.items()}
        writer = PartWriter(ORIGIN)
        for entry in part.entries:
            data = [view.tobytes() for view in (deltas[entry.name].positions, deltas[entry.name].new)]
            plain = [
                PlainTensor(spec.suffix, spec.dtype, spec.shape, memoryview(some))
                for spec, some in zip(entry.plain_tensors, data, strict=True)
            ]
            writer.add(entry, Encoded(entry.detail, plain=plain))
        data = bytes_of(part)
        assert data == b"".join(map(bytes, writer.chunks()))
        assert len(data) == part.size
        assert part.near == writer.near
        found = CardPart(arriving(data, part.near))
        for entry in found.entries:
            found.check(entry)  # the checksums that the card made
        applied(there.changes(arriving(data, part.near), ORIGIN), deltas, words)


def test_some_of_the_tensors_once_they_are_known():
    words = words_of(MIXED)
    there = steps(MIXED, words)
    deltas = changed(MIXED, words, without=("a", "e"))
    part, _ = PlainParts().made(on_card(deltas), ORIGIN, 1)
    data = bytes_of(part)
    assert there.changes(arriving(data, part.near), ORIGIN) is None
    there.learn(PartsPatch([CardPart(arriving(data, part.near))]))
    applied(there.changes(arriving(data, part.near), ORIGIN), deltas, words)


def test_what_is_left_to_the_reader_of_parts(monkeypatch):
    words = words_of(ALIKE)
    there = steps(ALIKE, words)
    deltas = changed(ALIKE, words)
    part, _ = PlainParts().made(on_card(deltas), ORIGIN, 1)
    data = bytes_of(part)
    good = arriving(data, part.near)
    other = Origin("0" * 32, 4, "1" * 64, "2" * 64)
    assert there.changes(good, other) is None
    for head, table in ((good.head[:-1] + b"x", good.table), (good.head, good.table[:-5])):
        found = ArrivingPart("part", good.size, head, table, good.spans, good.held)
        assert there.changes(found, ORIGIN) is None
    short = [held[:-1] for held in good.held()]
    assert (
        there.changes(ArrivingPart("part", good.size, good.head, good.table, good.spans, lambda: short), ORIGIN) is None
    )
    monkeypatch.setattr(plain_card, "TOGETHER", 100)
    assert there.changes(good, ORIGIN) is None


def test_positions_out_of_order_are_refused():
    words = words_of(ALIKE)
    before = {name: one.clone() for name, one in words.items()}
    deltas = changed(ALIKE, words)
    deltas["w2"].on_card.words.positions[1] = 5000
    part, _ = PlainParts().made(on_card(deltas), ORIGIN, 1)
    with pytest.raises(FormatError) as error:
        steps(ALIKE, words).changes(arriving(bytes_of(part), part.near), ORIGIN)
    assert error.value.code == "indices-order"
    assert "'w2'" in error.value.where
    assert all(torch.equal(one, before[name]) for name, one in words.items())


def test_what_is_no_step_of_a_card():
    words = words_of(ALIKE)
    deltas = changed(ALIKE, words)
    assert on_card({}) is None
    assert not PlainParts.takes([], set())
    assert not PlainParts.takes(on_card(deltas), {*ALIKE, "w1.indices"})
    for other in ({"on_card": None}, {"box": Box((60,), (10,), (30,))}, {"sums": None}):
        assert on_card({**deltas, "norm": replace(deltas["norm"], **other)}) is None


def test_a_header_that_lies_elsewhere_is_refused():
    words = words_of(ALIKE)
    part, _ = PlainParts().made(on_card(changed(ALIKE, words)), ORIGIN, 1)
    data = bytes_of(part)
    head, start, end = part.near
    assert part.near != NOWHERE
    for near in ((head, start - 8, end), (head - 8, start, end), (head, start, end - 1)):
        with pytest.raises(FormatError):
            CardPart(arriving(data, near))
