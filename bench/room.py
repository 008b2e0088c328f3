"""Readers and writers of a 1.2 GB model held against `cp -r`, where the system has free pages and where it has none.

bench/synth.py's model. What `cp -r` takes depends on whether the system has pages for the copy or has to find some
first, so both are made: a file of holes is read until no page is free, and for the other case given up again. What is
read afterwards (source, patches, slots) is in the page cache both times. Candidate and `cp -r` take turns.

- cache: `apply --cache` of a step, into a cache that has both slots
- cold: `apply` of the anchor and 10 patches into a new directory
- alone: `write` without a base / `write --base`, of the fourth step, on a repository of three patches

    python bench/room.py [--only cache cold alone] [--turns 3] [--scale 1.0] [--work DIR] [--keep]
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from synth import generate
from turns import Pairs, take_turns

from deltackpt.cache import apply_to_cache
from deltackpt.publish.write import AnchorPolicy, write
from deltackpt.repository import Repository
from deltackpt.restore.materialize import apply

PATCHES, BEFORE = 10, 3  # of a cold apply; of a write that is measured
NEVER = AnchorPolicy(ratio=float("inf"))
LIMITS = {"cache": 0.6, "cold": 2.5, "alone": 1.3}
CASES = ("room", "no room")
LEAST, ENOUGH = 400 << 20, 4 << 30  # bytes of free pages below which there is no room, above which there is


def free() -> int:
    """Bytes of pages that hold nothing."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemFree"))


class Filler:
    """Takes all free pages, or gives them back: a file of holes in the page cache."""

    def __init__(self, path: Path) -> None:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(self._fd, 2 * size)
        self._size, self._at = 2 * size, 0

    def take(self, wanted: int) -> None:
        """So many bytes: of pages that are free, and of others' when these are used up."""
        piece = bytearray(16 << 20)
        for _ in range(0, wanted, len(piece)):
            os.preadv(self._fd, [piece], self._at)
            self._at = (self._at + len(piece)) % self._size

    def give(self) -> None:
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._fd)


class Bench:
    """The work folder: the checkpoints that are still wanted, and a repository of all."""

    def __init__(self, root: Path, turns: int, scale: float) -> None:
        self.root, self.turns = root, turns
        self.last = max(PATCHES, 2 + 2 * turns + 1)
        self.repo, self.early = root / "repo", root / "early"
        if not self.repo.exists():
            self._publish(scale)
        self.old, self.new, self.source = sorted((root / "model").iterdir())  # before, of `alone`, and what cp copies
        self.filler = Filler(root / "holes")
        self.free: dict[str, list[int]] = {case: [] for case in CASES}

    def _publish(self, scale: float) -> None:
        folders = generate(self.root / "model", self.last, scale=scale)
        for step, folder in enumerate(folders):
            if step == BEFORE + 1:
                shutil.copytree(self.repo, self.early, copy_function=os.link)
            write(folder, self.repo, base=folders[step - 1] if step else None, anchor=NEVER)
            if step and step - 1 not in {BEFORE, BEFORE + 1}:
                shutil.rmtree(folders[step - 1])

    def ready(self, case: str, *read: Path) -> None:
        """Free pages or none, and files in the page cache."""
        if case == "room" and free() < ENOUGH:
            self.filler.take(ENOUGH)
            self.filler.give()
        for folder in read:
            paths = [str(p) for p in folder.rglob("*") if p.is_file()]
            subprocess.run(["cat", *paths], stdout=subprocess.DEVNULL, check=True)
        for _ in range(3 if case == "no room" else 0):  # the system frees some more meanwhile
            self.filler.take(free() - LEAST)
        self.free[case].append(free())


def against_cp(
    bench: Bench, pairs: Pairs, case: str, candidate: Callable[[], Any], turn: int, read: list[Path]
) -> None:
    """One turn of both, each with as many free pages as the other, or as few."""
    copy = bench.root / "copy"
    copied = functools.partial(subprocess.run, ["cp", "-r", str(bench.source), str(copy)], check=True)
    take_turns(pairs, candidate, copied, turn, before=functools.partial(bench.ready, case, bench.source, *read))
    shutil.rmtree(copy)


def cache(bench: Bench) -> Iterator[tuple[str, Pairs]]:
    repo, folder = Repository.open(bench.repo), bench.root / "cache"
    pairs = {case: Pairs() for case in CASES}
    for step in range(3):
        apply_to_cache(repo, folder, step)
    for turn in range(2 * bench.turns):
        case, step = CASES[turn % 2], 3 + turn
        patches = sorted((bench.repo / "patches").glob(f"*{step}-*"))
        candidate = functools.partial(apply_to_cache, repo, folder, step)
        against_cp(bench, pairs[case], case, candidate, turn // 2, [folder, *patches])
    shutil.rmtree(folder)
    yield from pairs.items()


def cold(bench: Bench) -> Iterator[tuple[str, Pairs]]:
    repo, out = Repository.open(bench.repo), bench.root / "out"
    pairs = {case: Pairs() for case in CASES}
    for turn in range(2 * bench.turns):
        case = CASES[turn % 2]
        shutil.rmtree(out, ignore_errors=True)
        candidate = functools.partial(apply, repo, out, PATCHES)
        against_cp(bench, pairs[case], case, candidate, turn // 2, [bench.repo])
    shutil.rmtree(out)
    yield from pairs.items()


def alone(bench: Bench) -> Iterator[tuple[str, Pairs]]:
    """A repository of three patches is got back after each write."""
    pairs, repo = Pairs(), bench.root / "one"

    def publish(base: Path | None) -> None:
        write(bench.new, repo, base=base, anchor=NEVER)

    def again() -> None:
        shutil.rmtree(repo, ignore_errors=True)
        shutil.copytree(bench.early, repo, copy_function=os.link)
        bench.ready("room", repo, bench.old, bench.new)

    for turn in range(bench.turns + 1):
        candidate, baseline = (functools.partial(publish, base) for base in (None, bench.old))
        take_turns(pairs if turn else Pairs(), candidate, baseline, turn, before=again)
    yield "", pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=LIMITS, default=list(LIMITS))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--keep", action="store_true", help="Leave the work folder for the next run, with its turns.")
    args = parser.parse_args()
    root = args.work or Path(tempfile.mkdtemp(prefix="deltackpt-room-"))
    root.mkdir(parents=True, exist_ok=True)
    bench = Bench(root, args.turns, args.scale)
    try:
        for name in args.only:
            baseline = "write --base" if name == "alone" else "cp -r"
            for case, pairs in {"cache": cache, "cold": cold, "alone": alone}[name](bench):
                row = pairs.row(f"{name} / {baseline} {case}".strip(), name, baseline, LIMITS[name])
                print(" | ".join((*row.cells(), row.detail)), flush=True)
        for case, found in bench.free.items():
            if found:
                print(f"{case}: {statistics.median(found) / 1e9:.1f} GB of pages were free before a call")
    finally:
        bench.filler.close()
        if not args.keep:
            shutil.rmtree(root)


if __name__ == "__main__":
    main()
