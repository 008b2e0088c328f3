"""Any byte of any file may be another: a typed error, or a state that the layout could not tell from the right one."""

import random

import pytest
from support.foreign_layouts import prime_files, prime_ranks, prime_update, slime, slime_v1, trl

from deltackpt.errors import DeltackptError

LAYOUTS = {
    "slime": slime,
    "stitch": lambda *a: slime(*a, encoding="xor_sparse"),
    "slime-v1": slime_v1,
    "slime-v1 zstd": lambda *a: slime_v1(*a, encoding="deltas_zstd"),
    "trl": trl,
    "trl first": lambda *a: trl(*a, form="first"),
    "prime files": prime_files,
    "prime update": lambda *a: prime_update(*a, compressed=True),
    "prime ranks": prime_ranks,
}
TIMES = 12


def damage(chance: random.Random, data: bytes) -> bytes:
    at = chance.randrange(len(data) if chance.random() < 0.5 else min(len(data), 600))
    kind = chance.randrange(4)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + chance.randbytes(chance.randrange(1, 9)) + data[at:]
    if kind == 2:
        return data[:at] + data[at + chance.randrange(1, 9) :]
    piece = chance.choice([b'"', b"[", b"-1", b"9" * 19, b"null", b"{}", b"\xff", bytes([data[at] ^ 1 << at % 8])])
    return data[:at] + piece + data[at + len(piece) :]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("times", [TIMES, pytest.param(300, marks=pytest.mark.heavy)])
def test_damage(world, layout, times):
    LAYOUTS[layout](world.src, 1, world.states[0], world.states[1])
    world.take()
    files = sorted(path for path in world.src.rglob("*") if path.is_file())
    chance, refused = random.Random(layout), 0
    for _ in range(times):
        path = chance.choice(files)
        data = path.read_bytes()
        path.write_bytes(damage(chance, data))
        try:
            world.take()
        except DeltackptError as error:
            refused += 1
            assert error.exit_code in (2, 3, 4)
        path.write_bytes(data)
    assert refused > times // 3


def test_nothing_of_a_pickle_is_read(world):
    path = trl(world.src, 1, world.states[0], world.states[1])
    path.write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR.")
    world.not_taken("header-too-long")
