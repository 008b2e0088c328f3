"""Tensors that change on a device, and what the host makes of the same changes. Needs torch.

To be imported before Triton: on a machine without a GPU the kernels run in Triton's interpreter.
"""

import numpy as np
import torch

from support.interpreted import interpret

if not torch.cuda.is_available():
    interpret()

from deltackpt.codecs import Change, wants_base
from deltackpt.codecs.packed import list_index
from deltackpt.format import state_digest
from deltackpt.format.dtypes import DTYPES, in_order, out_of_order, uint
from deltackpt.gpu import pipeline
from deltackpt.gpu.changes import wide
from deltackpt.hooks.finite import count_words
from deltackpt.torch_views.boxes import Box
from deltackpt.torch_views.extract import Piece
from deltackpt.torch_views.snapshot import Snapshot
from deltackpt.torch_views.words import NAMES, from_host, on_host
from support.states import encode, random_bytes

WHERE = "cuda" if torch.cuda.is_available() else "cpu"
TORCH = {name: dtype for dtype, name in NAMES.items()}


def words_of(rng, name, shape, share, kind="near"):
    """Old and new words of a tensor of which a share has moved, most by one ULP, or ("wild") anywhere."""
    dtype = DTYPES[name]
    old = np.frombuffer(random_bytes(rng, name, shape), uint(dtype.width)).copy()
    hit = rng.random(len(old)) < share
    if dtype.width == 8 or kind == "wild":
        new = np.frombuffer(rng.bytes(old.nbytes), old.dtype)
    else:
        signed = in_order(old, dtype)
        step = rng.choice([-1, 1], len(old)) * np.where(rng.random(len(old)) < 0.8, 1, rng.geometric(0.02, len(old)))
        new = out_of_order((signed + step.astype(signed.dtype)).astype(signed.dtype), dtype)
    return old, np.where(hit, new, old)


def piece_of(name, words, shape, dtype="BF16", box=None):
    tensor = from_host(words, WHERE).view(TORCH[dtype]).reshape(shape)
    return Piece(name, DTYPES[dtype], box or Box.all_of(shape), tensor)


def case(specs, kind="near", host=False, seed=0):
    """Pieces of (dtype, shape, share that changes), their old and new words by name, and a snapshot of the old ones."""
    rng = np.random.default_rng(seed)
    olds, news, pieces, before = {}, {}, [], []
    for i, (name, shape, share) in enumerate(specs):
        olds[f"w{i}"], news[f"w{i}"] = words_of(rng, name, shape, share, kind)
        before.append(piece_of(f"w{i}", olds[f"w{i}"], shape, name))
        pieces.append(piece_of(f"w{i}", news[f"w{i}"], shape, name))
    return pieces, olds, news, Snapshot(before, host=host)


def change_of(piece, old, new):
    at = np.flatnonzero(old != new)
    return Change(piece.dtype, piece.storage, at, old[at], new[at], old, new)


def check_encoded(have, piece, old, new, asked="packed"):
    """What the host encodes: the same list index, and the same bytes. -> the index."""
    name, want = encode(change_of(piece, old, new), piece.storage, asked)
    assert name == "packed"
    for field in ("grid", "scale"):
        assert getattr(have.detail, field) == getattr(want.detail, field)
    for field in ("counts", "lengths", "checksums"):
        assert np.array_equal(getattr(have.detail, field), getattr(want.detail, field)), field
    assert list_index.write(have.detail) == list_index.write(want.detail)
    assert b"".join(have.payload) == b"".join(want.payload)
    return want.detail


def check_deltas(pieces, olds, news, snapshot, deltas, asked="packed"):
    """Every delta is what the host finds and encodes, and the snapshot has the new words. -> how many are encoded."""
    assert len({delta.name for delta in deltas}) == len(deltas)
    for delta in deltas:
        odd = count_words(delta.new, delta.dtype) - count_words(delta.old, delta.dtype)
        assert delta.odd in (None, odd), delta.name
    by_name, encoded = {delta.name: delta for delta in deltas}, 0
    for piece in pieces:
        old, new = olds[piece.name], news[piece.name]
        at = np.flatnonzero(old != new)
        assert on_host(snapshot.of(piece.name), piece.dtype).tobytes() == new.tobytes()
        if not len(at):
            assert piece.name not in by_name
            continue
        delta = by_name.pop(piece.name)
        assert delta.positions.dtype == (np.int64 if wide(piece) else np.uint32)
        assert np.array_equal(delta.positions, at)
        assert delta.old.tobytes() == old[at].tobytes()
        assert delta.new.tobytes() == new[at].tobytes()
        assert delta.elements == len(old)
        assert delta.sums == state_digest.of_change(piece.box.to_whole(at), old[at], new[at])
        assert (delta.base is None) != (delta.encoded is None)
        assert delta.base is None or delta.base.tobytes() == old.tobytes()
        if delta.encoded is not None:
            encoded += 1
            assert not wants_base("auto", piece.dtype, piece.elements, len(at))
            check_encoded(delta.encoded, piece, old, new, asked)
    assert not by_name
    return encoded


def check(pieces, olds, news, snapshot):
    """Capture the change, and compare every delta with the host's. -> how many were encoded when they were captured."""
    found = []
    pipeline.capture(pieces, snapshot, found, "auto")
    return check_deltas(pieces, olds, news, snapshot, found)
