"""Neighbors in groups of a bounded size."""

from hypothesis import given
from hypothesis import strategies as st

from deltackpt.util.grouped import grouped


@given(st.lists(st.integers(0, 9)), st.integers(0, 12), st.none() | st.integers(1, 4))
def test_groups_are_as_long_as_they_may_be(sizes, most, count):
    found = list(grouped(sizes, lambda size: size, most, count))
    assert [size for group in found for size in group] == sizes
    for group in found:
        assert len(group) == 1 or sum(group) <= most
        assert count is None or 1 <= len(group) <= count
    for group, after in zip(found, found[1:], strict=False):
        assert sum(group) + after[0] > most or len(group) == count
