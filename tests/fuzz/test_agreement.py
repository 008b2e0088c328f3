"""Mutated vectors through both decoders: what one takes, the other takes.

Of several defects each may name another, so codes are compared by the vectors, which have one.
"""

import pytest
from hypothesis import given
from targets import LAYOUT, digests_object, wrapped
from test_fuzz import damaged, rewritten
from tile_by_tile import PARTS
from vectors import code_of, second

from deltackpt.format import edge, layout, manifest

pytestmark = pytest.mark.hypothesis

READERS = {
    "part": (PARTS["streamed"], second().parse_part),
    "table": (lambda data: PARTS["streamed"](wrapped(data)), lambda data: second().parse_part(wrapped(data))),
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


@pytest.mark.parametrize("kind", ["manifest", "edge", "layout"])
def test_other_values(kind):
    given(rewritten(kind))(lambda data: agree(kind, data))()
