"""What is compiled ahead: every kernel, launched as it will be by a step of a dtype.

Kernels are compiled for each dtype, and anew where an address is no multiple of 16: that is left open where a tensor of
others may begin anywhere, and holds for all that is allocated here. They are not compiled for how many there are.
"""

from __future__ import annotations

import numpy as np
import torch

from deltackpt.codecs.packed import codec
from deltackpt.format.dtypes import DType, uint
from deltackpt.gpu import pipeline
from deltackpt.gpu.box_digest import sums_of_boxes
from deltackpt.gpu.decode import DecodeTask, TaskGroup, decode_back, decode_groups
from deltackpt.gpu.digest import sums_of_pieces, sums_of_runs
from deltackpt.gpu.places import Place, by_width, other
from deltackpt.gpu.plain import PlainWords, look_at
from deltackpt.torch_views.boxes import Box
from deltackpt.torch_views.delta import Delta
from deltackpt.torch_views.extract import Piece
from deltackpt.torch_views.snapshot import Snapshot
from deltackpt.torch_views.words import INTS, NAMES, from_host

SHAPE = (256, 512)
WIDEST = 4  # bytes of the widest words that `packed` takes
_EVERY = 61  # one of so many elements changes


def capture_round(device: torch.device, dtype: DType, *, host: bool = False) -> None:
    """Some tensors, of which some elements change; the last one begins at an odd address. ``host``: against a snapshot
    in host memory."""
    names = {safe: made for made, safe in NAMES.items()}
    for shift in (0, 1):
        pieces = []
        for number in range(3 if shift == 0 else 1):
            words = torch.ones(SHAPE[0] * SHAPE[1] + shift, dtype=INTS[dtype.width], device=device)[shift:]
            pieces.append(Piece(f"w{number}", dtype, Box.all_of(SHAPE), words.view(SHAPE).view(names[dtype.name])))
        snapshot, found = Snapshot(pieces, host=host), list[Delta]()
        for piece in pieces:
            piece.tensor.view(INTS[dtype.width]).view(-1)[::_EVERY] += 1
        sums_of_pieces(pieces)
        pipeline.capture(pieces, snapshot, found, "auto")


def receive_round(device: torch.device, dtype: DType) -> None:
    """A tensor is digested, where it begins at an even address and where not; a step of it is decoded, written, and
    undone, both where it lies and by places."""
    old = np.ones(SHAPE[0] * SHAPE[1], uint(dtype.width))
    where = np.arange(0, len(old), _EVERY)
    words = from_host(old, device)
    sums_of_runs([(words, 0)])
    sums_of_runs([(words[1:], 0)])
    high, wide = SHAPE
    sums_of_boxes([(words.view(SHAPE), Box((high, 2 * wide), (0, wide), SHAPE))])
    if dtype.width <= WIDEST:
        index, tiles = codec.encode(where, old[where], old[where] + 1, old, dtype, SHAPE)
        data = np.frombuffer(b"".join(tiles), np.uint8)
        sent = torch.empty(len(data) + -len(data) % 4, dtype=torch.uint8, device=device)
        sent[: len(data)] = torch.from_numpy(data.copy()).to(device)
        group = TaskGroup([DecodeTask(index, dtype, words, 0, len(data), "compiled ahead")], sent)
        for decoded in decode_groups([group]):
            decoded.placed().apply()
            decode_back(group)
    at, same = torch.from_numpy(where).to(device), words[: len(where)].clone()
    look_at([PlainWords(words, at.to(torch.int32), same)])
    places = [Place(words, 0, at, same, same)]
    for made in by_width(places):
        other(places, made)
        made.apply()
        made.revert()
