"""Mutated vectors through both decoders: what one takes, the other takes.

Of several defects each may name another, so codes are compared by the vectors, which have one.
"""

from types import SimpleNamespace

import pytest
from hypothesis import given
from support.fuzz_targets import LAYOUT, applied, base_of, digests_object, unchecked, wrapped
from support.tile_by_tile import PARTS
from support.vectors import code_of, second
from test_fuzz import EXTREMES, SEEDS, damaged, leb, rewritten

from deltackpt.errors import DeltackptError
from deltackpt.format import edge, layout, manifest

pytestmark = pytest.mark.hypothesis

READERS = {
    "part": (PARTS["streamed"], second().parse_part),
    "table": (lambda data: PARTS["streamed"](wrapped(data, 1)), lambda data: second().parse_part(wrapped(data, 1))),
    "table_v2": (lambda data: PARTS["streamed"](wrapped(data, 2)), lambda data: second().parse_part(wrapped(data, 2))),
    "manifest": (lambda data: manifest.decode(data, "here"), second().parse_manifest),
    "edge": (lambda data: edge.decode(data, "here"), second().parse_edge),
    "layout": (lambda data: layout.decode(data, "here"), second().parse_layout),
    "digests": (
        digests_object,
        lambda data: second().parse_digests(data, second().parse_layout(LAYOUT), "0" * 64),
    ),
}


def agree(kind, data):
    ours, theirs = (code_of(lambda: read(data)) for read in READERS[kind])  # noqa: B023
    assert (ours is None) == (theirs is None), (ours, theirs)


@pytest.mark.parametrize("kind", READERS)
def test_damaged(kind):
    given(damaged(kind))(lambda data: agree(kind, data))()


class Any:
    """A crc32 that is right."""

    def __eq__(self, other):
        return True

    __hash__ = None


@pytest.fixture
def sealed(monkeypatch):
    """Checksums are right, whatever the bytes are: to be used with `unchecked`."""
    for module in (second(), second().decode_v1):
        monkeypatch.setattr(module, "zlib", SimpleNamespace(crc32=lambda *data: Any()))


def verdicts(part):
    """What the library and the second decoder make of a part and tensors that fit it: codes, and the tensors."""
    reader, state, ours, theirs = second(), {}, {}, {}
    try:
        entries = PARTS["streamed"](part).entries
    except DeltackptError as error:
        return error.code, code_of(lambda: reader.parse_part(part)), ours, theirs
    for e in entries:
        if (base := base_of(e)) is not None:
            kind = reader.DTYPES[e.dtype.name]
            state.setdefault(e.name, reader.Tensor(kind, list(e.whole), base.view(f"<u{kind.width}")))
    with unchecked():
        code = code_of(lambda: ours.update(applied(PARTS["streamed"](part))))
    other = code_of(lambda: theirs.update(reader.apply_patch(state, [reader.parse_part(part)])))
    return code, other, ours, {n: theirs[n].elements.tobytes() if n in theirs else b"" for n in ours}


@pytest.mark.usefixtures("sealed")
@pytest.mark.parametrize("version", [1, 2])
def test_damaged_values(version):
    """What both make of a part whose tiles are damaged, as if their checksums were right."""

    @given(damaged("table" if version == 1 else "table_v2"))
    def one(data):
        code, other, ours, theirs = verdicts(wrapped(data, version))
        assert (code is None) == (other is None), (code, other)
        assert code is not None or ours == theirs

    one()


# Of one defect both name the same; a run of numbers that ends with the table may be either of these.
EITHER = {"number-form", "table-short"}


def fields_of(table):
    """Where each field of a table of version 2 begins and ends, and whether it is a number."""
    found = []

    class Logged(second().Cursor):
        def take(self, size):
            found.append((self.at, self.at + size, False))
            return super().take(size)

        def number(self, *limit):
            first, at = len(found), self.at
            value = super().number(*limit)
            found[first:] = [(at, self.at, True)]
            return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(second(), "Cursor", Logged)
        second().parse_table(table)
    return found


def others(field, number):
    """Other bytes in the place of a field."""
    if number:
        yield from (leb(value) for value in EXTREMES if value < 1 << 63)
        yield from (leb(value) for value in (255, 1024, 1025, 1 << 40))
        yield from (field[:-1] + bytes([field[-1] | 128, 0]), b"\xff" * 10)
    elif len(field) == 1:
        yield from (bytes([field[0] ^ 1 << bit]) for bit in range(8))
        yield from (b"\0", b"\x0f", b"\x1f", b"\x21", b"\xff", bytes([(field[0] + 1) % 256]))
    else:
        yield from (bytes(len(field)), b"\xff" * len(field), field[:-1], field + b"\0")


@pytest.mark.usefixtures("engine", "sealed")
def test_every_field_of_a_table():
    """One at a time, with the values at its edges: taken by both, or refused by both with one code."""
    tried = 0
    for data in [seed for seed in SEEDS["table_v2"] if len(seed) < 400][::20]:
        size = int.from_bytes(data[:2], "little")
        table, payload = data[2 : 2 + size], data[2 + size :]
        for a, b, number in fields_of(table):
            for field in others(table[a:b], number):
                changed = table[:a] + field + table[b:]
                code, other, ours, theirs = verdicts(wrapped(len(changed).to_bytes(2, "little") + changed + payload, 2))
                assert code == other or {code, other} == EITHER, (code, other, table, changed)
                assert ours == theirs
                tried += 1
    assert tried > 500, tried


@pytest.mark.parametrize("kind", ["manifest", "edge", "layout"])
def test_other_values(kind):
    given(rewritten(kind))(lambda data: agree(kind, data))()
