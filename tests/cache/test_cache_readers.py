"""What a reader of a managed cache may hold open or mapped is left as it is when the cache moves on."""

import hashlib
import mmap
from pathlib import Path

from support.chains import World

from deltackpt.cache import apply_to_cache


def test_the_directory_that_readers_hold_is_left_alone(tmp_path):
    world = World(tmp_path)
    links = world.run(2)
    cache = tmp_path / "cache"
    first = Path(apply_to_cache(world.repo, cache, str(links[0].step)).path).resolve()
    with (first / "model.safetensors").open("rb") as file:
        held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        before = hashlib.sha256(held).digest()
        second = Path(apply_to_cache(world.repo, cache).path).resolve()
        assert second != first
        assert hashlib.sha256(held).digest() == before
        assert (first / "model.safetensors").read_bytes() != (second / "model.safetensors").read_bytes()
