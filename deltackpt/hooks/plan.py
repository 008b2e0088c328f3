"""Which rank publishes what: every tensor of the state, its boxes and their owners, and the files of an anchor."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from deltackpt.errors import ChainError, CheckpointError, UsageError
from deltackpt.format.dtypes import DTYPES, nbytes
from deltackpt.format.layout import Layout, Shard
from deltackpt.format.safetensors_header import Tensor, build_header, parse_header
from deltackpt.torch_views.boxes import Box, cover_once
from deltackpt.torch_views.extract import Piece
from deltackpt.torch_views.names import listed

SHARD_BYTES = 5 << 30  # of an anchor's file, as Hugging Face's tools cut them
LEAST = 256 << 20  # bytes below which no file is cut so that every rank has one to write
INDEX = "model.safetensors.index.json"

Held = list[tuple[str, str, Box]]  # what a rank holds: name, dtype, box


@dataclass(frozen=True)
class Global:
    """One tensor of the state: its published dtype, its shape, and which rank publishes each box of it."""

    dtype: str
    shape: tuple[int, ...]
    owners: tuple[tuple[int, Box], ...]

    @property
    def nbytes(self) -> int:
        """Bytes as published."""
        return nbytes(DTYPES[self.dtype], self.shape)


@dataclass(frozen=True)
class FilePlan:
    """The checkpoint of a step without the values: its files, tensors and side files."""

    shards: tuple[Shard, ...]
    contents: Mapping[str, bytes]  # side files by path
    tensors: Mapping[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        found = {t.name: t for shard in self.shards for t in shard.header.tensors}
        object.__setattr__(self, "tensors", {name: found[name] for name in sorted(found, key=str.encode)})

    def with_side(self, contents: Mapping[str, bytes]) -> FilePlan:
        """The same with side files more, or others of their paths."""
        return replace(self, contents={**self.contents, **contents}) if contents else self

    @property
    def side(self) -> tuple[str, ...]:
        """Paths of the side files, sorted."""
        return tuple(sorted(self.contents))

    def side_bytes(self, path: str) -> bytes:
        """A side file's bytes."""
        return self.contents[path]

    @property
    def size(self) -> int:
        """Bytes of the weights' files."""
        return sum(shard.size for shard in self.shards)


def held_by(pieces: Sequence[Piece]) -> Held:
    """What a rank that has these pieces holds."""
    return [(piece.name, piece.dtype.name, piece.box) for piece in pieces]


def plan_state(held: Sequence[Held]) -> dict[str, Global]:
    """All tensors, given what every rank holds. A box that several ranks hold is published by one of them, and the
    bytes are spread evenly.

    Raises CheckpointError ``checkpoint-empty`` without a tensor, and UsageError ``placement-unknown`` where boxes
    overlap or leave something out.
    """
    boxes: dict[str, dict[Box, list[int]]] = {}
    dtypes: dict[str, set[tuple[str, tuple[int, ...]]]] = {}
    for rank, items in enumerate(held):
        for name, dtype, box in items:
            dtypes.setdefault(name, set()).add((dtype, box.whole))
            known = boxes.setdefault(name, {})
            if box.size or not box.proper:
                known.setdefault(box, []).append(rank)
    if not boxes:
        need = "tensors to publish"
        raise CheckpointError("checkpoint-empty", where="the model", have="no tensor", need=need)
    bad = [
        name for name, kinds in dtypes.items() if len(kinds) > 1 or not cover_once(list(boxes[name]) or [_none(kinds)])
    ]
    if bad:
        raise UsageError(
            "placement-unknown",
            where=listed(sorted(bad)),
            have="shards that overlap, disagree or leave something out",
            need="every element of a tensor once, or whole tensors",
            hint="Say where plain tensors lie with `locate=`.",
        )
    load = [0] * len(held)
    plan = {}
    by_size = sorted(boxes, key=lambda name: (-math.prod(next(iter(dtypes[name]))[1]), name))
    for name in by_size:
        dtype, whole = next(iter(dtypes[name]))
        owners = []
        for box, ranks in sorted(boxes[name].items(), key=lambda item: item[0].offset):
            owner = min(ranks, key=lambda rank: (load[rank], rank))
            load[owner] += box.size * DTYPES[dtype].bits
            owners.append((owner, box))
        plan[name] = Global(dtype, whole, tuple(owners))
    return {name: plan[name] for name in sorted(plan, key=str.encode)}


def shard_size(plan: Mapping[str, Global], ranks: int) -> int:
    """Bytes of a file of an anchor: such that every rank has one to write, unless that would make them small."""
    total = sum(tensor.nbytes for tensor in plan.values())
    return min(SHARD_BYTES, max(LEAST, -(-total // ranks)))


def shard_cut(plan: Mapping[str, Global], adapter: bool, shard_bytes: int | None, ranks: int) -> tuple[str, int]:
    """What new files are called, and the bytes at which one ends: of an adapter, PEFT reads one file."""
    if adapter:
        return "adapter_model", sum(tensor.nbytes for tensor in plan.values())
    return "model", shard_bytes or shard_size(plan, ranks)


def _none(kinds: set[tuple[str, tuple[int, ...]]]) -> Box:
    """The box of a tensor of which no rank holds an element: right only if it has none."""
    whole = next(iter(kinds))[1]
    return Box(whole, (0,) * len(whole), (0,) * max(1, len(whole)))


def files_of(
    plan: Mapping[str, Global], parent: Layout | None, side: Mapping[str, bytes], shard_bytes: int, stem: str = "model"
) -> FilePlan:
    """The checkpoint's files: those of the parent step, if the tensors are the same, else new ones.

    ``side`` replaces the parent's side files of the same path; ``stem`` is what new files are called.
    """
    known = {name: (t.dtype, t.shape) for name, t in parent.tensors.items()} if parent else None
    if parent is not None and known == {name: (g.dtype, g.shape) for name, g in plan.items()}:
        return FilePlan(parent.shards, side)
    groups: list[list[str]] = [[]]
    filled = 0
    for name, tensor in plan.items():
        if groups[-1] and filled + tensor.nbytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += tensor.nbytes
    if len(groups) == 1:
        return FilePlan((_shard(f"{stem}.safetensors", groups[0], plan),), side)
    paths = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    total = sum(tensor.nbytes for tensor in plan.values())
    weight_map = {name: path for path, group in zip(paths, groups, strict=True) for name in group}
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True)
    shards = tuple(_shard(path, group, plan) for path, group in zip(paths, groups, strict=True))
    return FilePlan(shards, {**side, INDEX: f"{index}\n".encode()})


def _shard(path: str, names: Sequence[str], plan: Mapping[str, Global]) -> Shard:
    """Tensors by falling width, so that all are aligned, then by name."""
    order = sorted(names, key=lambda name: (-DTYPES[plan[name].dtype].width, name.encode()))
    tensors, at = [], 0
    for name in order:
        tensors.append(Tensor(name, plan[name].dtype, plan[name].shape, at, at + plan[name].nbytes))
        at += plan[name].nbytes
    head = build_header(tensors, {"format": "pt"})
    return Shard(path, parse_header(head, None, path))


def check_plan(now: Mapping[str, object], first: Mapping[str, object]) -> None:
    """Raise ChainError ``state-changed`` if the model has other tensors than when the hook was made."""
    odd = sorted(name for name in {*now, *first} if now.get(name) != first.get(name))
    if odd:
        hint = "Close the hook and make a new one with resume='anchor'."
        have = f"other names, dtypes, shapes or shards: {listed(odd)}"
        raise ChainError("state-changed", where="the model", have=have, need="the tensors it had at first", hint=hint)
