"""The collector of garbage is held off by any number of blocks at a time, and is afterwards as it was."""

import gc

import pytest

from deltackpt.util.collector import without_collector


@pytest.fixture(autouse=True)
def as_before():
    was = gc.isenabled()
    yield
    (gc.enable if was else gc.disable)()


@pytest.mark.parametrize("was", [True, False])
def test_it_is_as_it_was(was):
    (gc.enable if was else gc.disable)()
    with without_collector():
        assert not gc.isenabled()
        with without_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() == was
    with pytest.raises(ValueError, match="x"), without_collector():
        raise ValueError("x")
    assert gc.isenabled() == was


def test_blocks_that_end_in_another_order():
    gc.enable()
    first, second = without_collector(), without_collector()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
