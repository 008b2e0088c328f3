"""What each of N ranks reads of a patch, counted at the store: rows, columns or experts, as a share of all bytes.

The shapes are those of Llama 3 8B and of Qwen3 30B with 128 experts. Masters are N(0, 0.02); a step adds a Gaussian, so
that the density asked for of the bf16 elements changes. One layer is made and encoded, and counts for all. A rank opens
the part and reads what its boxes take, as `ShareReader` does: ranges with at most the gap between them are one request,
while little is read in vain. Of tensors that are split; small ones that every rank holds whole are told apart, and so
are header and table, which every rank reads.

"foreign" is what a rank reads in tiles of which others hold elements: it needs their old elements to decode these.
``--fine 8`` is a writer's ``encoding="auto@8"``: tensors are cut into as many rows and columns of tiles, where each
then has some 128 changes or more.

    python bench/shares.py [--model 8b|moe|stacked] [--density 0.01 0.001] [--ranks 8] [--gap 65536] [--fine 0]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deltackpt.codecs import Change, Entry, encode, subset
from deltackpt.format.dtypes import DTYPES
from deltackpt.format.manifest import File
from deltackpt.patch.index import Origin, Span
from deltackpt.patch.part import PartWriter
from deltackpt.shares import Held, ShareReader
from deltackpt.shares.bounds import Bounds, whole
from deltackpt.shares.reader import GAP
from deltackpt.store import MemoryStore

BLOCK = 1 << 22
SPREAD = np.float32(0.02)
UPDATE, POWER = 2.4e-7, 1.143  # sigma of an update that changes 1 %; others by this power of the density

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Model:
    """Tensors of one layer, of the rest, how many layers there are, and what engines split by columns."""

    layer: Shapes
    rest: Shapes
    layers: int
    columns: tuple[str, ...]


def dense(vocabulary: int, hidden: int, inner: int, keys: int, layers: int) -> Model:
    layer = {"q": (hidden, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, hidden)}
    layer |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner), "norm": (hidden,)}
    return Model(layer, {"embed": (vocabulary, hidden), "head": (vocabulary, hidden)}, layers, ("o", "down"))


def experts(count: int, hidden: int, inner: int, *, stacked: bool) -> Model:
    layer: Shapes = {"q": (4096, hidden), "k": (512, hidden), "v": (512, hidden), "o": (hidden, 4096)}
    layer |= {"norm": (hidden,), "router": (count, hidden)}
    if stacked:
        layer |= {"experts.gate_up": (count, 2 * inner, hidden), "experts.down": (count, hidden, inner)}
    else:
        for e in range(count):
            layer |= {f"experts.{e}.gate": (inner, hidden), f"experts.{e}.up": (inner, hidden)}
            layer |= {f"experts.{e}.down": (hidden, inner)}
    return Model(layer, {"embed": (151_936, hidden), "head": (151_936, hidden)}, 48, ("o", "down"))


MODELS: dict[str, Callable[[], Model]] = {
    "8b": lambda: dense(128_256, 4096, 14_336, 1024, 32),
    "moe": lambda: experts(128, 2048, 768, stacked=False),
    "stacked": lambda: experts(128, 2048, 768, stacked=True),
    "small": lambda: dense(1024, 256, 512, 64, 2),
}


def part_of(n: int, rank: int, ranks: int) -> tuple[int, int]:
    return n * rank // ranks, n * (rank + 1) // ranks


def on_axis(shapes: Shapes, axis: int, rank: int, ranks: int) -> Held:
    """Every matrix cut on its last axis, or on the one before it."""
    found: dict[str, list[Bounds]] = {}
    for name, shape in shapes.items():
        box = list(whole(shape))
        if len(shape) > 1 and name != "router":
            box[axis] = part_of(shape[axis], rank, ranks)
        found[name] = [tuple(box)]
    return found


def as_engines(model: Model, shapes: Shapes, rank: int, ranks: int) -> Held:
    """Rows of what is parallel in its output, columns of what is in its input."""
    rows, columns = (on_axis(shapes, axis, rank, ranks) for axis in (-2, -1))
    return {name: (columns if name.rpartition(".")[2] in model.columns else rows)[name] for name in shapes}


def by_expert(model: Model, shapes: Shapes, rank: int, ranks: int) -> Held:
    """Whole experts; all else as tensor-parallel ranks have it."""
    found = dict(as_engines(model, shapes, rank, ranks))
    count = model.layer["router"][0]
    first, end = part_of(count, rank, ranks)
    for name, shape in shapes.items():
        if len(shape) == 3:
            found[name] = [((first, end), *whole(shape[1:]))]
        elif name.startswith("experts."):
            found[name] = [whole(shape)] if first <= int(name.split(".")[1]) < end else []
    return found


@dataclass
class Counted:
    """A store whose ranges are counted."""

    store: MemoryStore
    url: str = "memory"
    parallel: int = 1
    asked: list[Span] = field(default_factory=list)

    def part(self, file: File) -> bytes:
        raise AssertionError("nobody reads it whole")

    def ranges(self, file: File, spans: Sequence[Span]) -> list[bytes]:
        self.asked += spans
        return [self.store.get_range(file.name, a, b - a) for a, b in spans]

    def taken(self) -> tuple[int, int]:
        asked, self.asked = self.asked, []
        return len(asked), sum(b - a for a, b in asked)


def bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return rounded


def step(rng: np.random.Generator, elements: int, density: float) -> tuple[npt.NDArray[np.uint16], ...]:
    """Old and new words of a tensor."""
    old, new = np.empty(elements, np.uint16), np.empty(elements, np.uint16)
    for at in range(0, elements, BLOCK):
        n = min(BLOCK, elements - at)
        masters = rng.standard_normal(n, np.float32) * SPREAD
        old[at : at + n] = bf16(masters)
        masters += rng.standard_normal(n, np.float32) * np.float32(UPDATE * (density / 0.01) ** POWER)
        new[at : at + n] = bf16(masters)
    return old, new


def encoded(shapes: Shapes, density: float, fine: int) -> tuple[bytes, int, int]:
    """A part -> its bytes, changed elements, and elements."""
    writer, rng = PartWriter(Origin("ab" * 16, 1, "cd" * 32, "ef" * 32)), np.random.default_rng(0)
    changed = total = 0
    for name, shape in sorted(shapes.items()):
        old, new = step(rng, math.prod(shape), density)
        at = np.flatnonzero(old != new)
        change = Change(DTYPES["BF16"], shape, at, old[at], new[at], old, new)
        used, found = encode(change, shape, f"packed@{fine}" if fine else "packed")
        changed, total = changed + len(at), total + len(old)
        writer.add(Entry(name, used, DTYPES["BF16"], shape, shape, (0,) * len(shape), found.detail), found)
    return b"".join(writer.chunks()), changed, total


@dataclass
class Read:
    """Of one rank, or of all of a patch: bytes, and requests."""

    split: int = 0
    replicated: int = 0
    foreign: int = 0
    requests: int = 0


def read(source: Counted, file: File, held: Held, shapes: Shapes, gap: int) -> tuple[Read, int]:
    """What a rank reads at the store, and the bytes of header and table before it."""
    found = Read()
    apart = {n: boxes for n, boxes in held.items() if list(boxes) == [whole(shapes[n])] and "experts" not in n}
    source.taken()
    reader = ShareReader(source, file, {n: boxes for n, boxes in held.items() if n not in apart}, gap=gap)
    head = file.size - sum(entry.payload for entry in reader.index.entries)
    source.taken()
    for one, _ in reader:
        lengths = subset.lengths(one.entry)
        found.foreign += int(lengths[one.shared].sum())
    found.requests, found.split = source.taken()
    for _ in (replicated := ShareReader(source, file, apart, gap=gap)):
        pass
    found.replicated = replicated.share.size
    return found, head


def table(model: Model, density: float, args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """A row for each layout: the rank that reads most."""
    groups = [(model.layer, model.layers), (model.rest, 1)]
    parts = [encoded(shapes, density, args.fine) for shapes, _ in groups]
    layouts: dict[str, Callable[[Shapes, int], Held]] = {
        "rows": lambda shapes, rank: on_axis(shapes, -2, rank, args.ranks),
        "columns": lambda shapes, rank: on_axis(shapes, -1, rank, args.ranks),
        "tensor parallel": lambda shapes, rank: as_engines(model, shapes, rank, args.ranks),
    }
    if "router" in model.layer:
        layouts["experts"] = lambda shapes, rank: by_expert(model, shapes, rank, args.ranks)
    everything = sum(len(part) * times for (part, *_), (_, times) in zip(parts, groups, strict=True))
    for name, layout in layouts.items():
        worst, tables, totals = Read(), 0, 0
        ranks = [Read() for _ in range(args.ranks)]
        for (part, *_), (shapes, times) in zip(parts, groups, strict=True):
            store = MemoryStore()
            store.put("part", [part])
            source, file = Counted(store), File("part", len(part), "0" * 64)
            for rank, total in enumerate(ranks):
                found, head = read(source, file, layout(shapes, rank), shapes, args.gap)
                for field_ in ("split", "replicated", "foreign", "requests"):
                    setattr(total, field_, getattr(total, field_) + times * getattr(found, field_))
            tables += times * head
            totals += times * (len(part) - head - found.replicated)
        worst = max(ranks, key=lambda one: one.split)
        yield {
            "layout": name,
            "ranks": args.ranks,
            "density": sum(c * t for (_, c, _), (_, t) in zip(parts, groups, strict=True))
            / sum(n * t for (*_, n), (_, t) in zip(parts, groups, strict=True)),
            "patch_mb": everything / 1e6,
            "table_percent": 100 * tables / everything,
            "split_percent": 100 * worst.split / totals,
            "foreign_percent": 100 * worst.foreign / totals,
            "replicated_percent": 100 * worst.replicated / everything,
            "requests": worst.requests,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, nargs="+", default=["8b"])
    parser.add_argument("--density", type=float, nargs="+", default=[0.01, 0.001])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--gap", type=int, default=GAP, help="bytes between two ranges that are read as one")
    parser.add_argument(
        "--fine", type=int, default=0, choices=(0, 2, 4, 8, 16), help="tiles for so many ranks; 0: none"
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    rows = []
    for model in args.model:
        for density in args.density:
            for row in table(MODELS[model](), density, args):
                rows.append({"model": model, "fine": args.fine, "gap": args.gap, **row})
                print(
                    f"{model:8} {row['density']:.3%} {row['layout']:16} {row['patch_mb']:8.1f} MB"
                    f"  split {row['split_percent']:5.2f} %  foreign {row['foreign_percent']:5.2f} %"
                    f"  table {row['table_percent']:4.2f} %  replicated {row['replicated_percent']:4.2f} %"
                    f"  requests {row['requests']}",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
