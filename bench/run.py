"""Every figure that deltackpt promises, measured, in one table: ratios first, what they are ratios of beside them.

    python bench/run.py [--quick] [--only GROUP ...] [--work DIR] [--keep]

A machine is noisy, so a candidate and its baseline take turns, and the median of the turns counts. Both find their
files in the page cache. Real chains are trained by bench/chain.py, the 1.2 GB model is bench/synth.py's.
All that is written goes below the work folder; about 20 GB, removed at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import inspect
import itertools
import os
import platform
import shutil
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from floor import Floor, floor, tensors
from synth import generate

from deltackpt.format import state_digest
from deltackpt.publish.write import AnchorPolicy, WriteResult, write
from deltackpt.repository import Repository
from deltackpt.restore.materialize import apply
from deltackpt.util.parallel import threads_or_default

HERE = Path(__file__).parent
CHUNK = 1 << 20  # elements of the bare compare pass
MB = 1e6
PATCHES = 10  # a cold apply reads an anchor and so many
CACHED = 7  # writes with --cache; the first two make its slots
ON_THE_CHAIN = {"write", "apply", "cold", "memory"}
NEVER = AnchorPolicy(ratio=float("inf"))


@dataclass(frozen=True)
class Row:
    """One line of the table. ``required`` is a limit to stay at or below, or above; None where nothing is promised."""

    figure: str
    measured: float | None
    unit: str
    detail: str
    required: float | None = None
    at_least: bool = False

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "n/a" if self.required is None else "MISSED"
        if self.required is None:
            return ""
        reached = self.measured >= self.required if self.at_least else self.measured <= self.required
        return "ok" if reached else "MISSED"

    def cells(self) -> tuple[str, str, str, str]:
        def shown(value: float | None) -> str:
            return "-" if value is None else f"{value:.3f} {self.unit}" if value < 100 else f"{value:,.0f} {self.unit}"

        limit = "" if self.required is None else f"{'>=' if self.at_least else '<='} {self.required:g} {self.unit}"
        return self.figure, limit, shown(self.measured), self.verdict


@dataclass(frozen=True)
class Published:
    """One step of a real chain in a repository: its floor, what `write` says, and how much the repository grew."""

    floor: Floor
    result: WriteResult
    grown: int

    @property
    def ratio(self) -> float:
        return 8 * self.result.patch_bytes / self.floor.bits


@dataclass(frozen=True)
class Took:
    """Seconds by the clock, and of all cores (children's included), which say more on a machine that others use."""

    clock: float
    cpu: float


@dataclass(frozen=True)
class Pairs:
    """A candidate and its baseline, timed in turns. Both of a turn see the same machine, so turns are compared."""

    turns: list[tuple[Took, Took]] = dataclasses.field(default_factory=list)

    def row(self, figure: str, candidate: str, baseline: str, required: float, more: str = "") -> Row:
        def median(cpu: bool = False) -> tuple[float, float]:
            times = [[(took.cpu if cpu else took.clock) for took in turn] for turn in self.turns]
            return statistics.median(t[0] for t in times), statistics.median(t[1] for t in times)

        ratios = [a.clock / b.clock for a, b in self.turns]
        (a, b), (a_cpu, b_cpu) = median(), median(cpu=True)
        detail = (
            f"{more}{candidate} {a:.3f} s, {baseline} {b:.3f} s; median of {len(ratios)} turns, from {min(ratios):.2f} "
            f"to {max(ratios):.2f}; CPU {a_cpu:.2f} s and {b_cpu:.2f} s: {a_cpu / b_cpu:.2f} x"
        )
        return Row(figure, statistics.median(ratios), "x", detail, required)


class Work:
    """The work folder and what is made in it once, when first asked for."""

    def __init__(self, root: Path, quick: bool, groups: Collection[str]) -> None:
        self.root = root
        self.quick = quick
        self.threads = threads_or_default(None)
        self.scale = 0.25 if quick else 1.0
        # No more big checkpoints than are wanted; the last one is written by a process whose memory is watched.
        self.steps = max(PATCHES + 1 if name in ON_THE_CHAIN else CACHED if name == "cache" else 1 for name in groups)

    def fresh(self, name: str) -> Path:
        path = self.root / name
        shutil.rmtree(path, ignore_errors=True)
        return path

    def chain(self, lr: str, steps: int, dtype: str = "bf16") -> list[Path]:
        """A real chain, trained here unless the work folder has it already."""
        steps = min(steps, 3) if self.quick else steps
        out = self.root / f"chain_{dtype}_{lr}"
        folders = [out / f"step_{step:06d}" for step in range(steps + 1)]
        if not folders[-1].exists():
            say(f"training {steps} steps at lr {lr}, {dtype}")
            shutil.rmtree(out, ignore_errors=True)
            quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}
            args = [
                sys.executable,
                str(HERE / "chain.py"),
                str(out),
                "--lr",
                lr,
                "--steps",
                str(steps),
                "--dtype",
                dtype,
            ]
            done = subprocess.run(args, env=os.environ | quiet, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"bench/chain.py: {done.stderr.strip().splitlines()[-1][:120]}")
        return folders

    @cached_property
    def published(self) -> list[Published]:
        """The real chain at lr 1e-6, in a repository."""
        return list(publish(self, self.chain("1e-6", 20)))

    @cached_property
    def states(self) -> list[Path]:
        """The big model, step 0 to the last."""
        say("generating the 0.6 B model's checkpoints")
        return generate(self.fresh("model"), self.steps, scale=self.scale)

    @cached_property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.states[0].iterdir())

    @cached_property
    def written(self) -> tuple[Path, Pairs]:
        """A repository of the big model but for its last step, and how long each patch took to publish with --base."""
        repo = self.fresh("repo")
        write(self.states[0], repo, threads=self.threads)
        pairs = Pairs()
        for step in range(1, self.steps):
            say(f"write --base, step {step}")
            old, new = self.states[step - 1], self.states[step]
            candidate = functools.partial(write, new, repo, base=old, threads=self.threads, anchor=NEVER)
            self._against_compare(pairs, old, new, candidate, step)
        return repo, pairs

    def _against_compare(self, pairs: Pairs, old: Path, new: Path, candidate: Callable[[], Any], step: int) -> None:
        compare(old, new, self.threads)  # warms the page cache
        take_turns(pairs, candidate, lambda: compare(old, new, self.threads), step)

    def written_by_cache(self) -> tuple[Pairs, list[float]]:
        """The same with --cache: a cache that has both slots, brought along to the new step.

        Also the seconds until each step was published, which is before its cache is brought along.
        """
        repo, cache = self.fresh("repo-cache"), self.fresh("cache")
        write(self.states[0], repo, threads=self.threads)
        apply_to_cache()(Repository.open(repo), cache, 0, threads=self.threads)
        pairs, published = Pairs(), []

        def publish(new: Path) -> None:
            published.append(write(new, repo, cache=cache, threads=self.threads, anchor=NEVER).published)

        for step in range(1, CACHED + 1):
            say(f"write --cache, step {step}")
            old, new = self.states[step - 1], self.states[step]
            candidate = functools.partial(publish, new)
            self._against_compare(pairs if step > 2 else Pairs(), old, new, candidate, step)
        for path in (repo, cache):
            shutil.rmtree(path)
        return pairs, published[2:]


def apply_to_cache() -> Callable[..., Any]:
    found: Callable[..., Any] = importlib.import_module("deltackpt.cache").apply_to_cache
    return found


def say(what: str) -> None:
    print(f"... {what}", file=sys.stderr, flush=True)


def timed(work: Callable[[], Any]) -> Took:
    clock, cpu = time.perf_counter(), sum(os.times()[:4])
    work()
    return Took(time.perf_counter() - clock, sum(os.times()[:4]) - cpu)


def take_turns(pairs: Pairs, candidate: Callable[[], Any], baseline: Callable[[], Any], turn: int) -> None:
    """One measurement of each, the next time the other way round; nothing is left to be written back before."""
    took = {}
    for work in (candidate, baseline) if turn % 2 else (baseline, candidate):
        os.sync()
        took[work] = timed(work)
    pairs.turns.append((took[candidate], took[baseline]))


def compare(old: Path, new: Path, threads: int) -> int:
    """The bare pass over two sets of bytes that no writer without the repository's help can do without."""
    jobs = []
    for path in sorted(old.glob("*.safetensors")):
        a, b = (np.memmap(p, np.uint16, "r", shape=p.stat().st_size // 2) for p in (path, new / path.name))
        jobs += [(a[at : at + CHUNK], b[at : at + CHUNK]) for at in range(0, len(a), CHUNK)]
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(lambda job: len(np.flatnonzero(job[0] != job[1])), jobs))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def publish(work: Work, chain: list[Path], encoding: str = "packed") -> Iterator[Published]:
    repo = work.fresh("repo-chain")
    write(chain[0], repo)
    size = size_of(repo)
    for old, new in itertools.pairwise(chain):
        result = write(new, repo, base=old, encoding=encoding, anchor=NEVER)
        before, size = size, size_of(repo)
        yield Published(floor(old, new), result, size - before)
    shutil.rmtree(repo)


def ratio_row(figure: str, steps: Iterable[Published], low: float, high: float, required: float) -> Row:
    chosen = [p for p in steps if low <= p.floor.density <= high]
    if not chosen:
        return Row(figure, None, "x", "no step has this density", required)
    ratios = [p.ratio for p in chosen]
    changes = sum(p.floor.changes for p in chosen)
    packed = 8 * sum(p.result.patch_bytes for p in chosen)
    per_tensor, pooled = (sum(getattr(p.floor, name) for p in chosen) for name in ("bits", "pooled_bits"))
    detail = (
        f"{len(chosen)} steps: min {min(ratios):.3f}, median {statistics.median(ratios):.3f}, max {max(ratios):.3f}; "
        f"together {packed / changes:.2f} bits a change, floor {per_tensor / changes:.2f} "
        f"(steps pooled {pooled / changes:.2f}); "
        f"density {min(p.floor.density for p in chosen):.2%} to {max(p.floor.density for p in chosen):.2%}"
    )
    return Row(figure, max(ratios), "x", detail, required)


def size(work: Work) -> Iterator[Row]:
    """The real chain of the demo; beside it, what the other encodings take."""
    steps = work.published
    yield ratio_row("packed / floor, density .2 to 1 %, worst step", steps, 0.002, 0.01, 1.0)
    grown, floor_bits = 8 * sum(p.grown for p in steps), sum(p.floor.bits for p in steps)
    changes = sum(p.floor.changes for p in steps)
    extra = [p.grown - p.result.patch_bytes for p in steps]
    detail = (
        f"{grown / changes:.2f} bits a change; besides the parts (manifest, digests, layout, changed side files) a "
        f"step takes {statistics.median(extra):,.0f} bytes, at most {max(extra):,}"
    )
    yield Row("all that the repository grows by / floor", grown / floor_bits, "x", detail)
    chain = work.chain("1e-6", 20)
    middle = len(chain) // 2
    for encoding in ("auto", "index", "nan", "planes"):
        one = next(publish(work, chain[middle - 1 : middle + 1], encoding))
        bits = 8 * one.result.patch_bytes / one.floor.changes
        detail = (
            f"step {middle}, density {one.floor.density:.2%}: {one.result.patch_bytes:,} bytes, {one.ratio:.2f} x floor"
        )
        yield Row(f"{encoding}, bits a change", bits, "b", detail)


def chains(work: Work) -> Iterator[Row]:
    """Slower and faster learning, for the densities around it."""
    found: list[Published] = []
    for lr, steps in (("3e-7", 20), ("1e-5", 6)):
        found += publish(work, work.chain(lr, steps))
    yield ratio_row("packed / floor, density .1 to 5 %, worst step", [*work.published, *found], 0.001, 0.05, 1.05)


def fp32(work: Work) -> Iterator[Row]:
    """Full-precision checkpoints one AdamW step apart; embeddings of absent tokens do not change, so both are told."""
    steps = list(publish(work, work.chain("1e-6", 3, "fp32"), "auto"))
    of_all = [8 * p.result.patch_bytes / p.floor.elements for p in steps]
    of_changed = [8 * p.result.patch_bytes / p.floor.changes for p in steps]
    floors = ", ".join(f"{p.floor.bits / p.floor.changes:.2f}" for p in steps)
    detail = "steps: " + ", ".join(f"{bits:.2f}" for bits in of_all)
    yield Row("fp32 pair, bits an element, worst step", max(of_all), "b", detail, 12)
    detail = "steps: " + ", ".join(f"{bits:.2f}" for bits in of_changed) + f"; floor {floors}"
    yield Row("fp32 pair, bits a changed element", max(of_changed), "b", detail, 12)


def write_base(work: Work) -> Iterator[Row]:
    _, pairs = work.written
    more = f"{work.bytes / 1e9:.2f} GB, {work.threads} threads; "
    yield pairs.row("write --base / bare compare pass", "write --base", "compare", 2.8, more)


def write_cache(work: Work) -> Iterator[Row]:
    if "cache" not in inspect.signature(write).parameters:
        yield Row("write --cache / bare compare pass", None, "x", "write() has no cache parameter", 2.8)
        return
    pairs, published = work.written_by_cache()
    yield pairs.row("write --cache / bare compare pass", "write --cache", "compare", 2.8)
    ratio = statistics.median(own / compare.clock for own, (_, compare) in zip(published, pairs.turns, strict=True))
    detail = f"{statistics.median(published):.3f} s; then the cache is brought along"
    yield Row("write --cache, until the step is published / compare", ratio, "x", detail)


def apply_cache(work: Work) -> Iterator[Row]:
    """Incremental, in a cache that has both slots."""
    repo, cache, copy = Repository.open(work.written[0]), work.fresh("cache"), work.root / "copy"
    pairs = Pairs()
    for step in range(work.steps):
        say(f"apply --cache, step {step}")
        candidate = functools.partial(apply_to_cache(), repo, cache, step, threads=work.threads)
        if step < 3:  # makes the cache, its second slot, and takes the first turn of both
            candidate()
        else:
            against_cp(work, pairs, candidate, copy, step)
    shutil.rmtree(cache)
    yield pairs.row("apply --cache, one step / cp -r", "apply", "cp -r", 0.3)


def against_cp(work: Work, pairs: Pairs, candidate: Callable[[], Any], copy: Path, turn: int) -> None:
    source = work.states[turn]
    for path in source.iterdir():  # into the page cache
        subprocess.run(["cat", path], stdout=subprocess.DEVNULL, check=True)
    shutil.rmtree(copy, ignore_errors=True)
    take_turns(pairs, candidate, lambda: subprocess.run(["cp", "-r", source, copy], check=True), turn)
    shutil.rmtree(copy)


def apply_cold(work: Work) -> Iterator[Row]:
    repo, out = Repository.open(work.written[0]), work.root / "out"
    pairs = Pairs()
    for turn in range(6):
        say(f"apply from the anchor and {PATCHES} patches, turn {turn}")
        shutil.rmtree(out, ignore_errors=True)
        candidate = functools.partial(apply, repo, out, PATCHES, threads=work.threads)
        against_cp(work, pairs if turn else Pairs(), candidate, work.root / "copy", turn)
    for path in sorted(out.iterdir()):
        subprocess.run(["cmp", path, work.states[PATCHES] / path.name], check=True)
    shutil.rmtree(out)
    yield pairs.row(f"apply, anchor + {PATCHES} patches / cp -r", "apply", "cp -r", 2.5)


CHILD = """
import sys
from pathlib import Path
from deltackpt.publish.write import AnchorPolicy, write
if len(sys.argv) > 1:
    new, repo, base, threads = sys.argv[1:]
    write(new, repo, base=base or None, threads=int(threads), anchor=AnchorPolicy(ratio=float("inf")))
print(Path("/proc/self/status").read_text())
"""


def memory(work: Work) -> Iterator[Row]:
    """Peaks of a process that only imports, and of one that writes a step.

    The kernel's high-water mark (VmHWM) counts mapped pages of the page cache too. getrusage's ru_maxrss is the same
    mark, but a child inherits its parent's there. What only this process holds, RssAnon, has no mark: it is sampled.
    """
    idle, idle_anon = peak([])
    repo = work.written[0]
    total, anon = peak([str(work.states[-1]), str(repo), str(work.states[-2]), str(work.threads)])
    detail = (
        f"VmHWM {total / MB:.0f} MB against {idle / MB:.0f} idle; anonymous {(anon - idle_anon) / MB:.0f} MB above idle"
    )
    yield Row("peak memory of write --base above idle", (total - idle) / MB, "MB", detail, 512)


def peak(args: list[str]) -> tuple[int, int]:
    """-> highest VmHWM and RssAnon of a child, in bytes."""
    process = subprocess.Popen([sys.executable, "-c", CHILD, *args], stdout=subprocess.PIPE, text=True)
    anon = 0
    while process.poll() is None:
        anon = max(anon, field(Path(f"/proc/{process.pid}/status").read_text(), "RssAnon"))
        time.sleep(0.002)
    assert process.stdout is not None
    status = process.stdout.read()
    if process.returncode:
        raise RuntimeError("the child failed")
    return field(status, "VmHWM"), max(anon, field(status, "RssAnon"))


def field(status: str, name: str) -> int:
    lines = [line for line in status.splitlines() if line.startswith(f"{name}:")]
    return int(lines[0].split()[1]) << 10 if lines else 0  # a process that ended has none


def digests(work: Work) -> Iterator[Row]:
    """The whole checkpoint, mapped and in the page cache; a core's seconds are CPU seconds of one thread."""
    words = {name: w for name, (_, w) in tensors(work.states[0]).items()}
    total = sum(w.nbytes for w in words.values())

    def speed(one: Callable[[Any], Any]) -> float:
        times = [timed(lambda: [one(w) for w in words.values()]).cpu for _ in range(6)]
        return total / statistics.median(times[1:]) / 1e9

    read = speed(lambda w: w.view(np.uint64).max())
    yield Row("state digest", speed(state_digest.of_run), "GB/s", f"one core; {total / 1e9:.2f} GB", 0.8, at_least=True)
    hashed = speed(xxhash.xxh3_128_digest)
    yield Row(
        "xxh3 / a pass that only reads", hashed / read, "x", f"{hashed:.1f} and {read:.1f} GB/s, one core", 0.8, True
    )
    after = tensors(work.states[1])
    changes = []
    for name, old in words.items():
        new = after[name][1]
        at = np.flatnonzero(old != new)
        changes.append((at, old[at], new[at]))
    count = sum(len(at) for at, _, _ in changes)
    took = statistics.median(timed(lambda: [state_digest.of_change(*c) for c in changes]).cpu for _ in range(5))
    yield Row(
        "state digest, update", took / count * 1e9, "ns", f"a change; {count:,} changes in {took:.3f} s, one core"
    )


def run_time(*args: str) -> list[float]:
    script = Path(sys.executable).with_name("deltackpt")
    command = [str(script)] if script.exists() else [sys.executable, "-m", "deltackpt_cli"]

    def once() -> None:
        subprocess.run([*command, *args], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True)

    return [timed(once).clock for _ in range(10)][1:]  # the first one compiles


def log(work: Work) -> Iterator[Row]:
    count = 100 if work.quick else 1000
    say(f"publishing {count} steps")
    repo, states = work.fresh("repo-log"), generate(work.fresh("tiny"), 1, scale=0.001)
    for step in range(count):
        base = states[(step - 1) % 2] if step else None
        write(states[step % 2], repo, base=base, anchor=AnchorPolicy(every=50, ratio=float("inf")))
    times = run_time("log", str(repo))
    detail = f"median of {len(times)} ({min(times):.3f}-{max(times):.3f})"
    yield Row(f"deltackpt log, {count:,} steps", statistics.median(times), "s", detail, 0.5)


def start(work: Work) -> Iterator[Row]:
    times = run_time("--help")
    detail = f"median of {len(times)} ({min(times):.3f}-{max(times):.3f})"
    yield Row("deltackpt --help", statistics.median(times), "s", detail, 0.3)


GROUPS: dict[str, Callable[[Work], Iterator[Row]]] = {
    "size": size,
    "chains": chains,
    "fp32": fp32,
    "write": write_base,
    "cache": write_cache,
    "apply": apply_cache,
    "cold": apply_cold,
    "memory": memory,
    "digest": digests,
    "log": log,
    "start": start,
}


def measure(work: Work, names: Iterable[str]) -> list[Row]:
    """The rows of the groups; one that cannot be measured is a row too, and the others go on."""
    rows: list[Row] = []
    for name in names:
        say(name)
        try:
            found = list(GROUPS[name](work))
        except Exception as error:
            text = " ".join(str(error).split())[:160]
            found = [Row(f"{name}: not measured", None, "", f"{type(error).__name__}: {text}", 0)]
        for row in found:  # so that a run that is stopped has told something
            say(" | ".join((*row.cells(), row.detail)))
        rows += found
    ratios = [row for row in rows if row.unit == "x"]
    return ratios + [row for row in rows if row.unit != "x"]


def table(rows: list[Row]) -> str:
    cells = [("figure", "required", "measured", ""), *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(4)]
    lines = []
    for line, detail in zip(cells, ["detail", *(row.detail for row in rows)], strict=True):
        left = "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True))
        first, *more = textwrap.wrap(detail, 76) or [""]
        lines += [f"{left}  {first}".rstrip(), *(" " * (len(left) + 2) + text for text in more)]
    lines.insert(1, "-" * (sum(widths) + 8 + 76))
    return "\n".join(lines)


def machine() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line]
    cores, python = len(os.sched_getaffinity(0)), platform.python_version()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    hardware = f"{cores} cores ({names[0] if names else platform.machine()}), {memory:.0f} GiB"
    return f"{hardware}; Python {python}, numpy {np.__version__}; load at the start {os.getloadavg()[0]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models and short chains: does it run, not how fast")
    parser.add_argument("--only", action="append", choices=GROUPS, metavar="GROUP", help=f"one of: {', '.join(GROUPS)}")
    parser.add_argument("--work", type=Path, default=HERE / "work", help="where the files go")
    parser.add_argument("--keep", action="store_true", help="leave them there, and train no chain again the next time")
    args = parser.parse_args()
    root = args.work.resolve() / "deltackpt-bench"  # a folder of its own: it is emptied without asking
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free / 1e9
    if not args.quick and free < 22:
        raise SystemExit(
            f"the work folder has {free:.0f} GB free, and needs 22\n\nhint: give another with --work, or use --quick"
        )
    facts = machine()
    groups = args.only or list(GROUPS)
    try:
        rows = measure(Work(root, args.quick, groups), groups)
    finally:
        if not args.keep:
            shutil.rmtree(root)
    print(table(rows))
    promised = [row for row in rows if row.required is not None]
    reached = sum(row.verdict == "ok" for row in promised)
    print(f"\n{reached} of {len(promised)} figures reached; {facts}")
    if args.quick:
        print("quick: sizes too small for the figures to count")


if __name__ == "__main__":
    main()
