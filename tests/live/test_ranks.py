"""A trainer of several ranks: each offers what it owns, and an engine takes from all of them."""

import pytest

torch = pytest.importorskip("torch")

from support.live_ranks import sharded  # noqa: E402
from support.ranks import spawn  # noqa: E402


@pytest.mark.parametrize(("world", "carrier"), [(2, "tcp"), (3, "gloo"), (2, "nixl")])
def test_fsdp_ranks_to_one_engine(tmp_path, world, carrier):
    if carrier == "nixl":
        pytest.importorskip("nixl_cu13")
    assert spawn(world, sharded, tmp_path, carrier) == [""] * world
