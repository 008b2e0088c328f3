"""The digest of the state that all ranks hold together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from deltackpt.errors import CheckpointError
from deltackpt.format import state_digest
from deltackpt.format.state_digest import Sums
from deltackpt.hooks.plan import Global
from deltackpt.torch_views.boxes import Box
from deltackpt.torch_views.extract import Piece
from deltackpt.torch_views.names import listed
from deltackpt.torch_views.words import on_host
from deltackpt.util.parallel import ordered_map

RUN = 1 << 22  # elements that are cast and hashed at once


def owned(pieces: Sequence[Piece], plan: Mapping[str, Global], rank: int) -> list[Piece]:
    """The pieces that this rank publishes."""
    return [piece for piece in pieces if (rank, piece.box) in plan[piece.name].owners]


def piece_sums(piece: Piece) -> Sums:
    """A piece's share of its tensor's sums of the state digest, computed on the piece's device."""
    if piece.tensor.device.type != "cpu":
        from deltackpt.gpu.digest import sums_of_piece

        found: Sums = sums_of_piece(piece)
        return found
    box = piece.box
    if not box.contiguous:
        return state_digest.of_box(on_host(piece.words(), piece.dtype).reshape(box.shape), box.offset, box.whole)
    start = box.start if box.proper else 0
    total = state_digest.ZERO
    for at in range(0, piece.elements, RUN):
        total = state_digest.add(
            total, state_digest.of_run(on_host(piece.words(at, at + RUN), piece.dtype), start + at)
        )
    return total


def all_sums(pieces: Sequence[Piece], threads: int) -> dict[str, Sums]:
    """Every piece's share by name."""
    if pieces and all(piece.tensor.device.type != "cpu" for piece in pieces):
        from deltackpt.gpu.digest import sums_of_pieces

        return {p.name: s for p, s in zip(pieces, sums_of_pieces(pieces), strict=True)}
    work: Callable[[Piece], Sums] = piece_sums
    return {p.name: s for p, s in zip(pieces, ordered_map(work, pieces, threads), strict=True)}


Boxes = dict[tuple[str, Box], Sums]  # what a rank holds, replicas included, and its share of the sums


def added(held: Sequence[Boxes]) -> dict[str, Sums]:
    """The sums of every tensor, each box once. Raises CheckpointError ``replicas-differ`` where two ranks hold the same
    box with other bits.
    """
    known: Boxes = {}
    differ: set[str] = set()
    for boxes in held:
        for key, sums in boxes.items():
            if known.setdefault(key, sums) != sums:
                differ.add(key[0])
    if differ:
        raise CheckpointError(
            "replicas-differ",
            where="the model",
            have=f"ranks with other bits in {listed(sorted(differ))}",
            need="replicas that agree",
            hint="Only one of them would be published. Find out why the ranks differ.",
        )
    total: dict[str, Sums] = {}
    for (name, _), sums in known.items():
        total[name] = state_digest.add(total.get(name, state_digest.ZERO), sums)
    return total


def state_of(plan: Mapping[str, Global], sums: Mapping[str, Sums]) -> str:
    """The state digest, hex."""
    return state_digest.state((name, t.dtype, t.shape, sums.get(name, state_digest.ZERO)) for name, t in plan.items())
