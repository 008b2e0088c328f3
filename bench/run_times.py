"""The figures of bench/run.py that are seconds and memory."""

from __future__ import annotations

import functools
import inspect
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from floor import tensors
from rows import Row, say
from synth import generate
from turns import Pairs, take_turns, timed
from work import PATCHES, Work, apply_to_cache

from deltackpt.format import state_digest
from deltackpt.publish.write import AnchorPolicy, write
from deltackpt.repository import Repository
from deltackpt.restore.materialize import apply

MB = 1e6


def write_base(work: Work) -> Iterator[Row]:
    _, pairs = work.written
    more = f"{work.bytes / 1e9:.2f} GB, {work.threads} threads; "
    yield pairs.row("write --base / bare compare pass", "write --base", "compare", 4.0, more)


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
