"""A trainer's model, and ranks of engines that hold it in every layout that engines have: what their loaders do.

Every receiver starts from zeros; `expected` says by the loader itself what it must hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

VOCABULARY, TRIMMED, WIDTH, INNER, EXPERTS = 96, 90, 64, 128, 4
SHAPES = {
    "embed": (VOCABULARY, WIDTH), "norm": (WIDTH,), "q": (WIDTH, WIDTH), "k": (32, WIDTH), "v": (32, WIDTH),
    "gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER), "late": (WIDTH, WIDTH),
    "even": (24, WIDTH), "odd": (24, WIDTH), "corner": (40, 40),
    "sixteen": (24, WIDTH), "gains": (WIDTH,), "scale": (1,),
    **{f"experts.{e}.w": (INNER, WIDTH) for e in range(EXPERTS)},
}  # fmt: skip
Weights = Iterable[tuple[str, torch.Tensor]]


def whole_state(seed: int = 1) -> dict[str, torch.Tensor]:
    """What is trained: in bf16, and one in fp16."""
    generator = torch.Generator().manual_seed(seed)
    state = {n: torch.randn(s, generator=generator).mul(0.02).bfloat16() for n, s in SHAPES.items()}
    return state | {"sixteen": state["sixteen"].half()}


def nudge_state(state: dict[str, torch.Tensor], step: int, share: float = 0.05) -> None:
    """One training step's change, in place."""
    generator = torch.Generator().manual_seed(1000 + step)
    for tensor in state.values():
        mask = torch.rand(tensor.shape, generator=generator) < share
        tensor.add_((torch.randn(tensor.shape, generator=generator) * 1e-3 * mask).bfloat16())


class Holding(torch.nn.Module):
    """Parameters by name, zeros, and how a tensor of the checkpoint goes into them, by its name."""

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], into: dict[str, Callable[[Any, torch.Tensor], None]],
        wide: torch.dtype = torch.bfloat16,
    ):  # fmt: skip
        super().__init__()
        for name, shape in shapes.items():
            values = torch.zeros(shape, dtype=wide)
            self.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))
        self.into = into

    def load_weights(self, weights: Weights) -> None:
        for name, w in weights:
            if name in self.into:
                self.into[name](self, w)


def cut(n: int, rank: int, ranks: int) -> slice:
    return slice(n * rank // ranks, n * (rank + 1) // ranks)


def fused(rank: int, ranks: int) -> Holding:
    """Rows of q, k and v in one parameter, of gate and up in another; columns of the way down."""
    wide, narrow, inner = WIDTH // ranks, 32 // ranks, INNER // ranks

    def rows(parameter: str, at: int, size: int) -> Callable[[Any, torch.Tensor], None]:
        def copy(model: Any, w: torch.Tensor) -> None:
            getattr(model, parameter).data[at : at + size].copy_(w[cut(w.shape[0], rank, ranks)])

        return copy

    into = {"q": rows("qkv", 0, wide), "k": rows("qkv", wide, narrow), "v": rows("qkv", wide + narrow, narrow)}
    into |= {"gate": rows("gate_up", 0, inner), "up": rows("gate_up", inner, inner)}
    into["down"] = lambda model, w: model.down.data.copy_(w[:, cut(INNER, rank, ranks)])
    shapes = {"qkv": (wide + 2 * narrow, WIDTH), "gate_up": (2 * inner, WIDTH), "down": (WIDTH, inner)}
    return Holding(shapes, into)


def vocabulary(rank: int, ranks: int) -> Holding:
    """Trimmed to what the tokenizer has, split, and padded; the head has the same words in a memory of its own."""
    part, room = TRIMMED // ranks, TRIMMED // ranks + 7

    def copy(model: Any, w: torch.Tensor) -> None:
        for place in (model.embed, model.head):
            place.data[part:].fill_(0)
            place.data[:part].copy_(w[:TRIMMED][cut(TRIMMED, rank, ranks)])

    return Holding({"embed": (room, WIDTH), "head": (room, WIDTH)}, {"embed": copy})


def pipeline(rank: int, ranks: int) -> Holding:
    """The last rank has the last layer and the norm, the others what comes before."""
    mine = ["late", "norm"] if rank == ranks - 1 else ["q", "k"]

    def whole(name: str) -> Callable[[Any, torch.Tensor], None]:
        return lambda model, w: getattr(model, name).data.copy_(w)

    return Holding({name: SHAPES[name] for name in mine}, {name: whole(name) for name in mine})


def experts(rank: int, ranks: int) -> Holding:
    """Stacked and transposed into one parameter: each rank its experts."""
    mine = range(EXPERTS)[cut(EXPERTS, rank, ranks)]

    def one(e: int) -> Callable[[Any, torch.Tensor], None]:
        return lambda model, w: model.w.data[e - mine.start].copy_(w.t())

    return Holding({"w": (len(mine), WIDTH, INNER)}, {f"experts.{e}.w": one(e) for e in mine})


def odd_pieces(rank: int, ranks: int) -> Holding:
    """One row, one column, an L: the last row and the first columns above it; two sources interleaved by rows."""

    def corner(model: Any, w: torch.Tensor) -> None:
        model.row.data.copy_(w[3 + rank : 4 + rank])
        model.column.data.copy_(w[:, 5 + rank : 6 + rank])
        model.bent.data[:40].copy_(w[39])
        model.bent.data[40:].view(39, 4 + rank).copy_(w[:39, : 4 + rank])

    into: dict[str, Callable[[Any, torch.Tensor], None]] = {"corner": corner}
    into["even"] = lambda model, w: model.both.data[0::2].copy_(w)
    into["odd"] = lambda model, w: model.both.data[1::2].copy_(w)
    shapes = {"row": (1, 40), "column": (40, 1), "bent": (40 + 39 * (4 + rank),), "both": (48, WIDTH)}
    return Holding(shapes, into)


def partial(rank: int, ranks: int) -> Holding:
    """A source of some rows of a parameter alone; the others have a constant."""

    def copy(model: Any, w: torch.Tensor) -> None:
        model.some.data[:10].fill_(7)
        model.some.data[20:].fill_(7)
        model.some.data[10:20].copy_(w[10:20])

    return Holding({"some": SHAPES["late"]}, {"late": copy})


def wide(rank: int, ranks: int) -> Holding:
    """Parameters in fp32, of tensors in bf16 and fp16: fused rows, columns, transposed, whole, and twice."""
    rows = WIDTH // ranks

    def heads(model: Any, w: torch.Tensor) -> None:
        model.qk.data[:rows].copy_(w[cut(WIDTH, rank, ranks)])

    def keys(model: Any, w: torch.Tensor) -> None:
        model.qk.data[rows:].copy_(w[cut(32, rank, ranks)])

    def twice(model: Any, w: torch.Tensor) -> None:
        for place in (model.embed, model.head):
            place.data.copy_(w[cut(VOCABULARY, rank, ranks)])

    into: dict[str, Callable[[Any, torch.Tensor], None]] = {"q": heads, "k": keys, "embed": twice}
    into["down"] = lambda model, w: model.down.data.copy_(w[:, cut(INNER, rank, ranks)])
    into["late"] = lambda model, w: model.late.data.copy_(w[cut(WIDTH, rank, ranks)].t())
    for name in ("sixteen", "gains", "scale"):
        into[name] = lambda model, w, name=name: getattr(model, name).data.copy_(w)
    shapes = {"qk": (rows + 32 // ranks, WIDTH), "down": (WIDTH, INNER // ranks), "late": (WIDTH, rows)}
    shapes |= dict.fromkeys(("embed", "head"), (VOCABULARY // ranks, WIDTH))
    shapes |= {name: SHAPES[name] for name in ("sixteen", "gains", "scale")}
    return Holding(shapes, into, torch.float32)


LAYOUTS: dict[str, Callable[[int, int], Holding]] = {
    "fused": fused, "vocabulary": vocabulary, "pipeline": pipeline, "experts": experts, "odd pieces": odd_pieces,
    "partial": partial, "wide": wide,
}  # fmt: skip


def expected(layout: str, rank: int, ranks: int, state: dict[str, torch.Tensor]) -> Holding:
    """What a rank's own loader makes of a whole checkpoint."""
    made = LAYOUTS[layout](rank, ranks)
    made.load_weights(state.items())
    return made


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    """Down to every bit."""
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(n == m and torch.equal(_bytes(x), _bytes(y)) for (n, x), (m, y) in pairs)


def moved(model: torch.nn.Module) -> bool:
    """Is there a bit in every parameter that is not zero?"""
    return all(bool((_bytes(t) != 0).any()) for t in model.state_dict().values())
