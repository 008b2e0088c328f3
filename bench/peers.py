"""deltackpt beside what others send, in one run on the same bytes: sizes, and seconds to encode and to apply.

    python bench/peers.py [--only real|synthetic] [--scale 0.5] [--steps 10] [--turns 3] [--threads 1] [--work DIR]
                          [--real OLD NEW] [--synthetic OLD NEW]

Two pairs of states: the last two of a real chain (bench/chain.py), and the synthetic model's (bench/synth.py); each is
made, unless two directories are given that are there already.
Layouts are raced in memory, in turns, and the median counts; each result is compared with the new state. General tools
run as their own processes on whole files, once. A tool that is missing, or takes too long, is a line that says so.
The tools are the Debian packages zstd, xdelta3 and bsdiff, and the wheel hf_xet (bench/xet.py). Prints a table for
bench/RESULTS.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from contestants import CONTESTANTS, Contestant, Pair
from floor import floor
from rows import machine
from synth import generate

from deltackpt.checkpoint import Checkpoint

HERE = Path(__file__).parent
LIMIT = 150  # seconds that a tool may take
BSDIFF_LIMIT = 64 << 20  # bytes of a file: it takes some 17 times as much memory


@dataclass(frozen=True)
class Row:
    name: str
    whose: str
    size: int | None = None
    encode: float | None = None
    apply: float | None = None
    note: str = ""

    def line(self, pair: Pair, ours: Row) -> str:
        if self.size is None:
            return f"| {self.name} | {self.whose} | {self.note} | | | | | |"

        def times(value: float | None, base: float | None) -> str:
            return f"{value:.3f} | {value / base:.2f}" if value is not None and base else "– | –"

        smaller = self.size / (ours.size or 1)
        cells = f"{self.size:,} | {8 * self.size / pair.changes:.2f} | {smaller:.2f}"
        seconds = f"{times(self.encode, ours.encode)} | {times(self.apply, ours.apply)}"
        return f"| {self.name} | {self.whose} | {cells} | {seconds} |"


def race(pair: Pair, turns: int, threads: int) -> list[Row]:
    """Every contestant, in turns, so that all see the same machine."""
    took: dict[str, list[tuple[float, float]]] = {c.name: [] for c in CONTESTANTS}
    sizes: dict[str, int] = {}
    for turn in range(turns):
        for contestant in CONTESTANTS[:: 1 if turn % 2 else -1]:
            say(f"{pair.title}, turn {turn + 1}: {contestant.name}")
            size, seconds = once(contestant, pair, threads)
            sizes[contestant.name] = size
            took[contestant.name].append(seconds)
    return [
        Row(c.name, c.whose, sizes[c.name], *(statistics.median(t[i] for t in took[c.name]) for i in (0, 1)))
        for c in CONTESTANTS
    ]


def once(contestant: Contestant, pair: Pair, threads: int) -> tuple[int, tuple[float, float]]:
    began = time.perf_counter()
    sent = contestant.encode(pair, threads)
    encoded = time.perf_counter() - began
    state = {name: words.copy() for name, words in pair.words(pair.old).items()}
    began = time.perf_counter()
    contestant.apply(sent, state, pair, threads)
    applied = time.perf_counter() - began
    for name, words in pair.words(pair.new).items():
        if not np.array_equal(words, state[name]):
            raise SystemExit(f"peers: {contestant.name} does not give {name} back")
    return contestant.size(sent), (encoded, applied)


def tools(pair: Pair, work: Path) -> Iterator[Row]:
    """General tools on the weights as one file each."""
    old, new, out, back = (work / name for name in ("old", "new", "out", "back"))
    for path, checkpoint in ((old, pair.old), (new, pair.new)):
        with path.open("wb") as file:
            for shard in checkpoint.shards:
                file.write((checkpoint.root / shard.path).read_bytes())
    window = f"{1 << max(20, (old.stat().st_size - 1).bit_length())}"
    commands = {
        "zstd -3 --patch-from": (
            ["zstd", "-qf", "-3", "--long=31", f"--patch-from={old}", str(new), "-o", str(out)],
            ["zstd", "-qfd", "--long=31", f"--patch-from={old}", str(out), "-o", str(back)],
        ),
        "xdelta3": (
            ["xdelta3", "-ef", "-B", window, "-s", str(old), str(new), str(out)],
            ["xdelta3", "-df", "-B", window, "-s", str(old), str(out), str(back)],
        ),
        "bsdiff": (["bsdiff", str(old), str(new), str(out)], ["bspatch", str(old), str(back), str(out)]),
        "zstd -3, whole file": (
            ["zstd", "-qf", "-3", str(new), "-o", str(out)],
            ["zstd", "-qfd", str(out), "-o", str(back)],
        ),
    }
    for name, (forward, backward) in commands.items():
        say(f"{pair.title}: {name}")
        if shutil.which(forward[0]) is None or shutil.which(backward[0]) is None:
            yield Row(name, "theirs", note="not installed")
        elif name == "bsdiff" and new.stat().st_size > BSDIFF_LIMIT:
            yield Row(name, "theirs", note=f"not run: a file above {BSDIFF_LIMIT >> 20} MiB")
        else:
            try:
                seconds = timed(forward), timed(backward)
            except subprocess.TimeoutExpired:
                yield Row(name, "theirs", note=f"not done after {LIMIT} s")
                continue
            if back.read_bytes() != new.read_bytes():
                raise SystemExit(f"peers: {name} does not give the file back")
            yield Row(name, "theirs", out.stat().st_size, *seconds)
    for path in (old, new, out, back):
        path.unlink(missing_ok=True)


def xet(pair: Pair, work: Path) -> Row:
    """The Hub's own transfer library, with a folder as its server."""
    name = "hf_xet, the step before in its store"
    say(f"{pair.title}: {name}")
    if importlib.util.find_spec("hf_xet") is None:
        return Row(name, "theirs", note="not installed")
    command = [sys.executable, str(HERE / "xet.py"), str(pair.old.root), str(pair.new.root), str(work / "xet")]
    try:
        found = json.loads(subprocess.run(command, check=True, timeout=2 * LIMIT, stdout=subprocess.PIPE).stdout)
    except subprocess.TimeoutExpired:
        return Row(name, "theirs", note=f"not done after {2 * LIMIT} s")
    return Row(name, "theirs", found["bytes"], found["upload"], found["download"])


def timed(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, timeout=LIMIT, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def table(pair: Pair, rows: list[Row], bits: float) -> Iterator[str]:
    (ours,) = (row for row in rows if row.name == "deltackpt auto")
    elements = sum(len(words) for words in pair.words(pair.new).values())
    size = sum(words.nbytes for words in pair.words(pair.new).values())
    share = pair.changes / elements
    yield f"{pair.title}: {pair.changes:,} of {elements:,} elements changed ({share:.2%}), {size:,} bytes;"
    yield f"the entropy of positions and ULP steps is {bits:.2f} bits a change.\n"
    yield "| | whose | bytes | bits a change | of ours | encode s | of ours | apply s | of ours |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for row in rows:
        yield row.line(pair, ours)


def measure(title: str, old: Path, new: Path, work: Path, turns: int, threads: int) -> Iterator[str]:
    found = floor(old, new)
    with Checkpoint.open(old) as a, Checkpoint.open(new) as b:
        pair = Pair(title, a, b, found.changes)
        rows = [*race(pair, turns, threads), *tools(pair, work), xet(pair, work)]
        yield from table(pair, rows, found.per_change(found.bits))
        yield ""


def real(work: Path, steps: int) -> tuple[Path, Path]:
    out = work / f"chain_{steps}"
    if not (out / f"step_{steps:06d}").exists():
        say(f"training {steps} steps")
        shutil.rmtree(out, ignore_errors=True)
        command = [sys.executable, str(HERE / "chain.py"), str(out), "--steps", str(steps)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return out / f"step_{steps - 1:06d}", out / f"step_{steps:06d}"


def synthetic(work: Path, scale: float) -> tuple[Path, Path]:
    shutil.rmtree(work / "model", ignore_errors=True)
    old, new = generate(work / "model", 1, scale=scale)
    return old, new


def say(what: str) -> None:
    print(f"... {what}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("real", "synthetic"))
    parser.add_argument("--scale", type=float, default=0.5, help="of the synthetic model; 1 is 1.2 GB")
    parser.add_argument("--steps", type=int, default=10, help="of the real chain, whose last one is raced")
    parser.add_argument("--real", type=Path, nargs=2, metavar=("OLD", "NEW"), help="steps that are there, not trained")
    parser.add_argument(
        "--synthetic", type=Path, nargs=2, metavar=("OLD", "NEW"), help="steps that are there, not made"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=HERE / "work")
    parser.add_argument("--keep", action="store_true", help="leave the states there for the next time")
    args = parser.parse_args()
    work = args.work.resolve() / "deltackpt-peers"
    work.mkdir(parents=True, exist_ok=True)
    facts = machine()
    try:
        if args.only != "synthetic":
            old, new = args.real or real(work, args.steps)
            for line in measure(f"Real chain, {old.name} to {new.name}", old, new, work, args.turns, args.threads):
                print(line, flush=True)
        if args.only != "real":
            old, new = args.synthetic or synthetic(work, args.scale)
            for line in measure("Synthetic pair", old, new, work, args.turns, args.threads):
                print(line, flush=True)
    finally:
        if not args.keep:
            shutil.rmtree(work)
    print(f"{facts}; {args.threads} thread(s), median of {args.turns}.")


if __name__ == "__main__":
    main()
