"""What a step asks of many tensors of a rank grows with them, and not with their square."""

from collections.abc import Mapping
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from deltackpt.engines.scatter import Fallback
from deltackpt.engines.slices.source import _Moving
from deltackpt.errors import ChainError
from deltackpt.format.state_digest import TensorDigest

MANY = 30_000
NAMES = [f"layers.{i}" for i in range(MANY)]


class Counted(Mapping):
    """Digests that count how often they are asked."""

    def __init__(self, found):
        self.found, self.asked = found, 0

    def __getitem__(self, name):
        self.asked += 1
        return self.found[name]

    def __contains__(self, name):
        self.asked += 1
        return name in self.found

    def __iter__(self):
        for name in self.found:
            self.asked += 1
            yield name

    def __len__(self):
        return len(self.found)


def moving(**more):
    proof = {"again": set(), "unproven": {}, "regions": dict.fromkeys(NAMES), "ties": {}} | more
    slices = SimpleNamespace(tensors=SimpleNamespace(tensors=dict.fromkeys(NAMES[1:])))
    made = _Moving(slices, SimpleNamespace(**proof), SimpleNamespace(parts=lambda: None), (None, None))
    made.names = NAMES
    return made


def digests(sums=(1, 2)):
    return Counted(dict.fromkeys(NAMES, TensorDigest(sums, b"")))


def test_digests_of_many_tensors_are_looked_up_once_each():
    before, after = digests(), digests((3, 4))
    assert moving().changed((before, after)) == NAMES[1:]
    assert before.asked + after.asked <= 4 * MANY


def test_ties_of_many_tensors_are_looked_at_once_each():
    class Names(list):
        walked = 0

        def __iter__(self):
            Names.walked += 1
            return super().__iter__()

    before, after = digests(), digests()
    one = moving(ties=dict(zip(NAMES[::2], NAMES[1::2], strict=True)))
    one.names = Names(NAMES)
    assert one.changed((before, after)) == NAMES[1:]
    assert Names.walked <= 4
    assert before.asked + after.asked <= 6 * MANY


@pytest.mark.parametrize("number", [0, 1])
def test_a_digest_that_is_missing_is_told(number):
    both = digests(), digests()
    del both[number].found[NAMES[7]]
    with pytest.raises(Fallback, match=f"{NAMES[7]}: the step has no digest of it"):
        moving().changed(both)
    assert moving(regions={}).changed(both) == NAMES[1:]


def test_a_tie_of_other_sums_is_told():
    both = digests(), digests()
    both[1].found[NAMES[5]] = TensorDigest((9, 9), b"")
    with pytest.raises(ChainError, match="tied-differs") as error:
        moving(ties={NAMES[4]: NAMES[5]}).changed(both)
    assert error.value.code == "tied-differs"
