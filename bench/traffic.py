"""The traffic of a live step between many ranks, from the overlaps that a session computes: bytes of every link.

Trainers hold the 8 B shapes by FSDP, on the first axis; engines are replicas of tensor-parallel groups. Nothing is
sent: who sends what to whom is `deltackpt.shares.overlaps`, and bytes follow from the elements and the size of a patch
(bench/shares.py: 8 B at 1 % is 0.0091 bytes an element, all changes alike).

pairs   every pair exchanges its share: a trainer sends a box to every replica
relay   a trainer sends a box once; replicas pass it on, each to the next one
all     the whole patch to every engine rank, as others do it

A lower bound is what has to pass a link at least: what an engine rank needs has to come in once; what a trainer holds
and anybody needs has to go out once (`relay`); without a relay all that comes in goes out of some trainer (`pairs`).

    python bench/traffic.py [--trainers 128] [--engines 512] [--parallel 8] [--host 8] [--bytes 0.0091]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shares import MODELS, as_engines, part_of

from deltackpt.shares import Held, Overlap, overlaps
from deltackpt.shares.bounds import size, whole

Elements = Mapping[str, int]  # by rank


def layouts(trainers: int, engines: int, parallel: int, name: str) -> tuple[dict[str, Held], dict[str, Held]]:
    """Who holds what on both sides; ranks are `t5` and `e17`."""
    model = MODELS[name]()
    shapes = {f"{i}.{n}": s for i in range(model.layers) for n, s in model.layer.items()} | model.rest
    sources = {
        f"t{r}": {n: [(part_of(s[0], r, trainers), *whole(s[1:]))] for n, s in shapes.items()} for r in range(trainers)
    }
    seats = [as_engines(model, shapes, r, parallel) for r in range(parallel)]
    return sources, {f"e{r}": seats[r % parallel] for r in range(engines)}


def links(found: Overlap) -> dict[str, tuple[Elements, Elements]]:
    """Elements that go out of every rank, and that come in, by how they are sent."""
    pairs, relay = (Counter[str](), Counter[str]()), (Counter[str](), Counter[str]())
    for move in found.moves:
        count, source = size(move.bounds), str(move.source)
        ways = [str(target) for target in move.targets]
        pairs[0][source] += count * len(ways)
        relay[0][source] += count
        for before, target in zip([None, *ways], ways, strict=False):
            pairs[1][target] += count
            relay[1][target] += count
            if before is not None:
                relay[0][before] += count
    return {"pairs": pairs, "relay": relay}


def by_host(ranks: Elements, host: int) -> Elements:
    found = Counter[str]()
    for rank, count in ranks.items():
        found[f"{rank[0]}{int(rank[1:]) // host}"] += count
    return found


def bounds(sources: Mapping[str, Held], targets: Mapping[str, Held], found: Overlap) -> dict[str, dict[str, float]]:
    """Elements that the busiest link of a kind has to carry at least, by how they are sent."""
    needs = {rank: sum(size(box) for boxes in held.values() for box in boxes) for rank, held in targets.items()}
    out = Counter[str]()
    for move in found.moves:
        out[str(move.source)] += size(move.bounds)
    once = max(out.values())
    return {
        "pairs": {"t out": sum(needs.values()) / len(sources), "e in": max(needs.values()), "e out": 0},
        "relay": {"t out": once, "e in": max(needs.values()), "e out": max(needs.values())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--trainers", type=int, default=128)
    parser.add_argument("--engines", type=int, default=512)
    parser.add_argument("--parallel", type=int, default=8, help="tensor-parallel ranks of a replica")
    parser.add_argument("--host", type=int, default=8, help="ranks of a host")
    parser.add_argument("--bytes", type=float, default=0.0091, help="of a patch, for each element of the model")
    args = parser.parse_args()
    sources, targets = layouts(args.trainers, args.engines, args.parallel, args.model)
    begun = time.perf_counter()
    found = overlaps(sources, targets)
    seconds = time.perf_counter() - begun
    assert not found.missing
    total = sum(size(box) for held in sources.values() for boxes in held.values() for box in boxes)
    mb = args.bytes / 1e6
    print(f"{args.trainers} trainers, {args.engines} engine ranks, {total / 1e9:.2f} B elements, {total * mb:.1f} MB")
    print(f"{len(found.moves):,} boxes, overlaps computed in {seconds:.1f} s")
    least = bounds(sources, targets, found)
    for way, (out, into) in links(found).items():
        for kind, ranks in (("t out", out), ("e in", into), ("e out", out)):
            loads = [count for rank, count in ranks.items() if rank[0] == kind[0]]
            if not loads:
                continue
            most, floor = max(loads), least[way][kind]
            hosts = max(count for rank, count in by_host(ranks, args.host).items() if rank[0] == kind[0])
            print(
                f"{way:6} {kind:6} busiest rank {most * mb:9.2f} MB  bound {floor * mb:9.2f} MB  {most / floor:5.3f} x"
                f"  all {sum(loads) * mb / 1e3:8.3f} GB  busiest host {hosts * mb:9.2f} MB"
            )
    print(
        f"all    t out  from one {total * args.engines * mb / 1e3:.3f} GB, spread over all "
        f"{total * args.engines * mb / args.trainers:9.2f} MB each; e in {total * mb:.2f} MB each"
    )


if __name__ == "__main__":
    main()
