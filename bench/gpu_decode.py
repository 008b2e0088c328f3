"""A step taken in on a card: from a part's bytes in host memory to weights written and proven, 8 B shapes, as a table.

Needs torch with CUDA, numpy and what deltackpt needs; without a GPU it runs small shapes in Triton's interpreter, which
shows that it works and no more. The weights and changes are bench/gpu_hook.py's; the parts are what the hook's kernels
make of them. Floors: the card reads every old word once, and the bytes of the part cross the bus.

    python bench/gpu_decode.py [--density 0.01 ...] [--size 8b|1b|small] [--repeat 3] [--rounded] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

if not torch.cuda.is_available():
    import os

    os.environ["TRITON_INTERPRET"] = "1"

from gpu_hook import SIZES, Clock, change, change_rounded, coded, model

from deltackpt.format import state_digest
from deltackpt.gpu import digest, pipeline
from deltackpt.gpu.decode import DecodeTask, decode
from deltackpt.gpu.diff import groups
from deltackpt.torch_views.extract import pieces_of
from deltackpt.torch_views.snapshot import Snapshot


def encoded(state: dict[str, torch.Tensor], snapshot: Snapshot) -> tuple[list[tuple[str, Any, int, int]], bytearray]:
    """Of every tensor that changed: name, list index, first byte and bytes of its payload; and all payloads."""
    made: dict[str, Any] = {}
    for some in pipeline.interleaved(coded(group, snapshot, None) for group in groups(pieces_of(state), snapshot)):
        made |= some
    held, data = [], bytearray()
    for name, tiles in made.items():
        begin = len(data)
        for run in tiles.payload:
            data += run
        held.append((name, tiles.detail, begin, len(data) - begin))
    return held, data


def timed(clock: Clock, work: Callable[[], Any], after: Callable[[], Any]) -> tuple[float, float]:
    """Median and first seconds of ``work``; ``after`` is not counted."""
    taken = []
    for _ in range(clock.repeat + 1):
        clock.wait()
        began = time.perf_counter()
        work()
        clock.wait()
        taken.append(time.perf_counter() - began)
        after()
    return statistics.median(taken[1:]), taken[0]


def measure(args: argparse.Namespace, density: float, state: dict[str, torch.Tensor]) -> dict[str, float]:
    where = next(iter(state.values())).device
    clock, pieces = Clock(where, args.repeat), pieces_of(state)
    snapshot = Snapshot(pieces, host=False)
    (change_rounded if args.rounded else change)(state, density)
    held, data = encoded(state, snapshot)
    by_name = {piece.name: piece for piece in pieces}
    after = dict(zip(by_name, digest.sums_of_pieces(pieces), strict=True))
    # The snapshot holds the old words: it is what is moved.
    words = {name: snapshot.of(name) for name, *_ in held}
    tasks = [
        DecodeTask(index, by_name[name].dtype, words[name], begin, size, name) for name, index, begin, size in held
    ]
    tasks.sort(key=lambda task: task.dtype.name)
    before = {name: digest.of_run(words[name]) for name in words}
    here = torch.frombuffer(data, dtype=torch.uint8)
    if where.type == "cuda":
        here = here.pin_memory()
        torch.cuda.reset_peak_memory_stats()
    resident = torch.cuda.memory_allocated() if where.type == "cuda" else 0
    found, made = list[Any](), list[Any]()

    def take() -> None:
        found.extend(decode(tasks, here.to(where, non_blocking=True)))

    def prove() -> None:
        gained = {t.where: both for group in found for t, both in zip(group.tasks, group.sums, strict=True)}
        for name, gain in gained.items():
            if state_digest.add(before[name], gain) != after[name]:
                raise SystemExit(f"gpu_decode: other sums of {name}")

    def write() -> None:
        made.extend(group.placed() for group in found)
        for write in made:
            write.apply()

    def back() -> None:
        for write in made:
            write.revert()
        made.clear()
        found.clear()

    result = {"part, MB": len(data) / 1e6, "changes, million": sum(t.index.changes for t in tasks) / 1e6}
    result["decode, ms"], result["first decode, ms"] = (1e3 * s for s in timed(clock, take, found.clear))
    result["decode, prove, write, ms"] = 1e3 * timed(clock, lambda: (take(), prove(), write()), back)[0]
    take()
    if where.type == "cuda":
        result["memory beyond weights, GB"] = (torch.cuda.max_memory_allocated() - resident) / 1e9
    write()
    for name, there in words.items():
        if not torch.equal(there, by_name[name].words()):
            raise SystemExit(f"gpu_decode: other words of {name}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--density", type=float, nargs="+", default=[0.01])
    parser.add_argument("--size", choices=SIZES, default="8b" if torch.cuda.is_available() else "small")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rounded", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    state = model(args.size, where)
    size = sum(t.nbytes for t in state.values())
    rows = {density: measure(args, density, state) for density in args.density}
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, interpreted: no figures"
    print(f"{card}; torch {torch.__version__}; {args.size}, {size / 1e9:.2f} GB; aim at 1 %: 40 ms in all, then 15\n")
    print("| | " + " | ".join(f"{d:.2%}" for d in rows) + " |\n| --- |" + " ---: |" * len(rows))
    for name in next(iter(rows.values())):
        print(f"| {name} | " + " | ".join(f"{row[name]:,.2f}" for row in rows.values()) + " |")
    if args.json:
        args.json.write_text(json.dumps({"card": card, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
