"""What a reader does before the first byte of a patch is decoded: layout, digests and part table of many tensors.

bf16 tensors of 16 x 64 under the names of DeepSeek's experts, in shards of at most 4,096; 1 % changed. The objects of
one step are read from a folder first; then each is parsed and checked from its bytes, in a process of its own a turn.

    python bench/many_read.py [--tensors 90000] [--turns 5] [--work DIR]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import many

many.WIDTH, many.HEIGHT, many.STEPS = 64, 16, 0
WHATS = ("layout", "digests", "part")


def prepare(folder: Path, tensors: int) -> None:
    """The objects of the second step of a repository, as files."""
    from deltackpt.publish.write import AnchorPolicy, write
    from deltackpt.repository import Repository

    many.STEPS = 1
    many.generate(folder, tensors, many.HEIGHT)
    for step in range(2):
        write(folder / str(step), folder / "repo", base=folder / "0" if step else None, anchor=AnchorPolicy(ratio=9e9))
    repo = Repository.open(folder / "repo")
    link = repo.find(1)
    step = repo.load(link)
    assert step.patch is not None
    for what, file in zip(WHATS, (step.layout, step.digests, step.patch[0]), strict=True):
        (folder / what).write_bytes(b"".join(repo.stream(file)))
    (folder / "state").write_text(step.state)


def child(folder: Path) -> None:
    """Processor seconds of each, to stdout."""
    from deltackpt.format import digests, layout
    from deltackpt.patch.part import PartReader
    from deltackpt.patch.tensor import PartsPatch

    held = {what: (folder / what).read_bytes() for what in WHATS}
    state, cost = (folder / "state").read_text(), {}

    def timed(what: str, work: Callable[[], object]) -> object:
        began = time.process_time()
        found = work()
        cost[what] = time.process_time() - began
        return found

    read = timed("layout", lambda: layout.decode(held["layout"], "layout"))
    assert isinstance(read, layout.Layout)
    timed("digests", lambda: digests.decode(held["digests"], read, state, "digests"))

    def table() -> object:
        patch = PartsPatch([PartReader(memoryview(held["part"]), "part")])
        assert patch.whole is not None
        return patch, patch.whole.rows_of(read.named)

    timed("part", table)
    print(json.dumps(cost | {"all": sum(cost.values())}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=90_000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--work", type=Path)
    args = parser.parse_args()
    folder = args.work or Path(tempfile.mkdtemp(prefix="deltackpt-many-"))
    try:
        if not (folder / "state").exists():
            prepare(folder, args.tensors)
        command = [sys.executable, __file__, "--child", str(folder)]
        turns = [json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(args.turns)]
        for what in (*WHATS, "all"):
            found = sorted(turn[what] for turn in turns)
            print(f"{what:8} {statistics.median(found):.3f} s, from {found[0]:.3f} to {found[-1]:.3f}")
    finally:
        if args.work is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]))
    else:
        main()
