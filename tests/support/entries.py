"""Entries of tables: made up, and compared."""

from dataclasses import fields, is_dataclass

import numpy as np

from deltackpt.checkpoint.diff import difference
from deltackpt.codecs import CHOICES, Entry
from deltackpt.format.dtypes import DTYPES
from support.states import V2, Form, Memory, changed, encode, random_bytes


def same(a, b) -> bool:
    """Equal dataclasses, arrays in them included."""
    if is_dataclass(a):
        return isinstance(a, type(b)) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and a.tolist() == b.tolist()
    return bool(a == b)


def random_entry(rng: np.random.Generator, name: str, form: Form = V2) -> Entry:
    dtype = str(rng.choice(sorted(DTYPES)))
    shape = [(8,), (64, 64), (2, 3, 8), (300, 200), (16, 8, 8)][rng.integers(5)]
    if rng.random() < 0.1:
        return Entry.removal(name, form.version)
    old = (dtype, shape, random_bytes(rng, dtype, shape))
    states = Memory({} if rng.random() < 0.2 else {name: old}), Memory({name: changed(rng, old, rng.random())})
    change = difference(name, *states).change
    if change.base is not None and len(change.positions) == 0:
        return Entry.removal(name, form.version)
    encoding, encoded = encode(change, shape, str(rng.choice(CHOICES)), form=form)
    whole, offset = shape, (0,) * len(shape)
    if (
        DTYPES[dtype].bits == 8 * DTYPES[dtype].width and encoding not in ("nan", "index") and rng.random() < 0.4
    ):  # a box
        offset = tuple(int(o) for o in rng.integers(0, 1 << 40, len(shape)))
        whole = (shape[0] + offset[0] + 1, *(s + o for s, o in zip(shape[1:], offset[1:], strict=True)))
        whole, offset = (whole[0], *shape[1:]), (offset[0], *[0] * (len(shape) - 1))
    return Entry(name, encoding, DTYPES[dtype], shape, whole, offset, encoded.detail, form.version)
