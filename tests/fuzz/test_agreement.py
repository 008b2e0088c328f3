"""Mutated vectors through both decoders: what one takes, the other takes.

Of several defects each may name another, so codes are compared by the vectors, which have one.
"""

from types import SimpleNamespace

import pytest
from hypothesis import given
from support.fuzz_targets import LAYOUT, applied, base_of, digests_object, unchecked, wrapped
from support.tile_by_tile import PARTS
from support.vectors import code_of, second
from test_fuzz import damaged, rewritten

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


@pytest.mark.parametrize("version", [1, 2])
def test_damaged_values(version, monkeypatch):
    """What both make of a part whose tiles are damaged, as if their checksums were right."""
    reader = second()
    for module in (reader, reader.decode_v1):
        monkeypatch.setattr(module, "zlib", SimpleNamespace(crc32=lambda *data: Any()))

    @given(damaged("table" if version == 1 else "table_v2"))
    def one(data):
        part = wrapped(data, version)
        try:
            entries = PARTS["streamed"](part).entries
        except DeltackptError:
            return
        state = {}
        for e in entries:
            if (base := base_of(e)) is not None:
                kind = reader.DTYPES[e.dtype.name]
                state.setdefault(e.name, reader.Tensor(kind, list(e.whole), base.view(f"<u{kind.width}")))
        ours, theirs = {}, {}
        with unchecked():
            code = code_of(lambda: ours.update(applied(PARTS["streamed"](part))))
        other = code_of(lambda: theirs.update(reader.apply_patch(state, [reader.parse_part(part)])))
        assert (code is None) == (other is None), (code, other)
        if code is None:
            assert ours == {n: theirs[n].elements.tobytes() if n in theirs else b"" for n in ours}

    one()


@pytest.mark.parametrize("kind", ["manifest", "edge", "layout"])
def test_other_values(kind):
    given(rewritten(kind))(lambda data: agree(kind, data))()
