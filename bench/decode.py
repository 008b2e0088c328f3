"""What it takes to decode many patches of the same tensors, one on top of the other, from a state at hand.

    python bench/decode.py [--steps 50] [--rows 1024] [--turns 7] [--chain DIR]

The chain is that of bench/sync.py, in a local folder: four bf16 tensors, some 1 % of the elements changed a step. One
thread; --chain keeps it for the next run, of other code say. Prints one JSON object, medians over the turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from sync import COLUMNS, chain

from deltackpt.checkpoint import Checkpoint
from deltackpt.format.dtypes import uint
from deltackpt.patch.squashed import SquashedPatch
from deltackpt.repository import Repository
from deltackpt.repository.chain import Hop
from deltackpt.restore.materialize import apply
from deltackpt.restore.patch_reader import PatchReader


def turn(repo: Repository, start: Path, work: Path, steps: int) -> dict[str, float]:
    seconds = {}
    began = time.perf_counter()
    hops = [Hop.of(repo.load(repo.find(step))) for step in range(1, steps + 1)]
    with PatchReader.open_all(repo, hops) as patches, Checkpoint.open(start) as state:
        seconds["open"] = time.perf_counter() - began
        merged = SquashedPatch(patches)
        found = {name: merged.tensor(name) for name in merged.names}
        old = {name: state.bytes_of(name).view(uint(tensor.dtype.width)) for name, tensor in found.items()}
        for words in old.values():
            np.bitwise_xor.reduce(words)  # from the disk, if it was not in memory
        began = time.perf_counter()
        for name, tensor in found.items():
            tensor.decode(old[name])
        seconds["decode"] = time.perf_counter() - began
    began = time.perf_counter()
    apply(repo, work / f"out-{time.monotonic_ns()}", steps, threads=1)
    seconds["cold apply"] = time.perf_counter() - began
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--chain", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        kept = args.chain or work / "chain"
        if not kept.exists():
            chain(work / "steps", str(kept), args.steps, (args.rows, COLUMNS))
        repo = Repository.open(str(kept))
        apply(repo, work / "start", 0)
        rows = [turn(repo, work / "start", work, args.steps) for _ in range(args.turns)]
        changes = sum(repo.load(repo.find(step)).counts.changed_elements for step in range(1, args.steps + 1))
    seconds = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    rate = round(changes / seconds["decode"] / 1e6, 1)
    print(json.dumps({"changes": changes, "million a second": rate, **{k: round(v, 4) for k, v in seconds.items()}}))


if __name__ == "__main__":
    main()
