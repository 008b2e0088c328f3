"""What a step costs a writer by the tensor: small tensors against the same bytes in a hundredth as many.

bf16 tensors of 64 x 256 under the names of DeepSeek's experts, in shards of at most 4,096, or as wide and a hundred
times as high; 1 % of the elements change a step. Every write runs in a process of its own, on a repository of three
patches that it gets back as it was; the few and the many take turns. Its memory is what the kernel counts as
anonymous, above what the process had before the call: pages of files are not in it.

    python bench/many.py [--tensors 6000 30000] [--turns 3] [--work DIR] [--keep] [--name-bytes 0]
    python bench/many.py --large 1000000000 [--whole]    one tensor of so many bytes, one element changed, or all
    python bench/many.py --large 10000000000 --sparse [--whole]    the same of holes, or from holes to values: no cache,
                                                         three times as much room on the disk, or five times
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

WIDTH, HEIGHT, FEWER = 256, 64, 100
IN_SHARD = 4096  # small tensors
STEPS = 4  # an anchor, three patches, and the step that is measured
WAYS = ("base", "cache", "alone")
LIMIT, ANYWAY = 1.5, 20e-6  # times the few's time, or seconds a tensor where that is more


@dataclass(frozen=True)
class Cost:
    """Of one write: seconds of the call, of all processors, and bytes of memory above idle."""

    seconds: float
    processor: float
    memory: int


def names(count: int, longer: int) -> Iterator[str]:
    """As DeepSeek has them; with ``longer`` of so many bytes."""
    for i in range(count):
        layer, expert, kind = i // 768, i // 3 % 256, ("down", "gate", "up")[i % 3]
        name = f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj.weight"
        yield name + "x" * (longer - len(name))


def shards_of(count: int, height: int, longer: int) -> list[tuple[bytes, int]]:
    """The header of each shard, and how many elements follow it."""
    found, every, size = [], list(names(count, longer)), 2 * height * WIDTH
    for first in range(0, count, IN_SHARD):
        some = every[first : first + IN_SHARD]
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for i, name in enumerate(some):
            entries[name] = {"dtype": "BF16", "shape": [height, WIDTH], "data_offsets": [i * size, (i + 1) * size]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        found.append((len(text).to_bytes(8, "little") + text, len(some) * height * WIDTH))
    return found


def generate(out: Path, count: int, height: int, longer: int = 0) -> None:
    """The checkpoints of all steps, ``out/0`` to ``out/4``."""
    shards = shards_of(count, height, longer)
    paths = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for step in range(STEPS + 1):
        (out / str(step)).mkdir(parents=True)
        weight_map = {n: p for p, (h, _) in zip(paths, shards, strict=True) for n in json.loads(h[8:]) if n[0] != "_"}
        (out / str(step) / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for number, (path, (head, elements)) in enumerate(zip(paths, shards, strict=True)):
        rng = np.random.default_rng(number)
        values = rng.standard_normal(elements, np.float32) * np.float32(0.02)
        bits = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        for step in range(STEPS + 1):
            if step:
                bits[rng.integers(0, elements, elements // 100)] += np.uint16(1)
            with (out / str(step) / path).open("wb") as file:
                file.write(head)
                file.write(bits.data)


def generate_large(out: Path, size: int, *, whole: bool) -> None:
    """One tensor of ``size`` bytes; one element of it changes a step, or with ``whole`` nearly all."""
    width = 4096
    height = size // 2 // width
    (head, elements), *_ = shards_of(1, height * width // WIDTH, 0)
    for step in range(STEPS + 1):
        bits = np.random.default_rng(step * whole).integers(0x3C00, 0x3D00, 1 << 24, np.uint16)
        (out / str(step)).mkdir(parents=True)
        with (out / str(step) / "model.safetensors").open("wb") as file:
            file.write(head)
            for first in range(0, elements, len(bits)):
                file.write(bits[: elements - first].data)
            file.seek(len(head) + elements)
            file.write(bytes([step]))


def generate_sparse(out: Path, size: int, *, whole: bool) -> None:
    """One tensor of ``size`` bytes, zeros that take no room; one element of it changes a step. With ``whole`` there are
    two steps, and of the second one nearly every element is another.
    """
    (head, elements), *_ = shards_of(1, size // 2 // WIDTH, 0)
    bits = np.random.default_rng(0).integers(0x3C00, 0x3D00, 1 << 24, np.uint16)
    for step in range(2 if whole else STEPS + 1):
        (out / str(step)).mkdir(parents=True)
        with (out / str(step) / "model.safetensors").open("wb") as file:
            file.write(head)
            file.truncate(len(head) + 2 * elements)
            for first in range(0, elements if step and whole else 0, len(bits)):
                file.write(bits[: elements - first].data)
            file.seek(len(head) + elements)
            file.write(bytes([step]))


def anonymous() -> int:
    """Bytes of this process that are pages of no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    return 0


def call_of(way: str, folder: Path, step: int) -> Callable[[], object]:
    """What is measured: a write of a step, or a reader."""
    from deltackpt.cache import apply_to_cache
    from deltackpt.publish.write import AnchorPolicy, write
    from deltackpt.repository import Repository
    from deltackpt.restore.materialize import apply
    from deltackpt.verification import verify_repository

    if way in WAYS:
        base = folder / str(step - 1) if way == "base" and step else None
        cache = folder / "cache" if way == "cache" else None
        anchor = AnchorPolicy(ratio=float("inf"))
        return lambda: write(folder / str(step), folder / "repo", base=base, cache=cache, anchor=anchor)
    repo = Repository.open(folder / "repo")
    if way == "apply":
        shutil.rmtree(folder / "out", ignore_errors=True)
        return lambda: apply(repo, folder / "out", step)
    return {
        "follow": lambda: apply_to_cache(repo, folder / "followed", step),
        "verify": lambda: verify_repository(repo),
    }[way]


def child(way: str, folder: Path, step: int) -> None:
    """One call; what it cost goes to stdout."""
    call = call_of(way, folder, step)
    idle, peak, over = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.005):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began, spent = time.monotonic(), time.process_time()
    done = call()
    seconds, processor = time.monotonic() - began, time.process_time() - spent
    over.set()
    watcher.join()
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print(json.dumps({"seconds": seconds, "processor": processor, "memory": peak - idle, "resident": highest}))
    print(done, file=sys.stderr)


def run(way: str, folder: Path, step: int) -> Cost:
    """`child` in a process of its own."""
    command = [sys.executable, __file__, "--child", way, str(folder), str(step)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    return Cost(found["seconds"], found["processor"], found["memory"])


def prepare(folder: Path) -> None:
    """A repository of an anchor and three patches, and a cache that followed them."""
    for step in range(STEPS):
        run("cache" if step else "base", folder, step)
    if not (folder / "kept").exists():
        shutil.copytree(folder / "repo", folder / "kept", copy_function=os.link)


def measured(folder: Path, way: str) -> Cost:
    """The write of the last step, taken back after it; a cache is moved back by the step before it."""
    cost = run(way, folder, STEPS)
    if way == "cache":
        shutil.rmtree(folder / "cache")
    shutil.rmtree(folder / "repo")
    shutil.copytree(folder / "kept", folder / "repo", copy_function=os.link)
    if way == "cache":
        from deltackpt.cache import apply_to_cache
        from deltackpt.repository import Repository

        repo = Repository.open(folder / "repo")
        for step in (STEPS - 2, STEPS - 1):  # both slots, so that the move is a patch
            apply_to_cache(repo, folder / "cache", step)
    return cost


def medians(costs: list[Cost]) -> Cost:
    seconds, processor = (statistics.median(getattr(c, of) for c in costs) for of in ("seconds", "processor"))
    return Cost(seconds, processor, max(c.memory for c in costs))


def compare(work: Path, count: int, turns: int, longer: int) -> None:
    """The table of one size."""
    many, few = work / f"many-{count}", work / f"few-{count}"
    for folder, tensors, height in ((many, count, HEIGHT), (few, max(1, count // FEWER), HEIGHT * FEWER)):
        if not folder.exists():
            generate(folder, tensors, height, longer)
            prepare(folder)
    costs: dict[tuple[Path, str], list[Cost]] = {(f, way): [] for f in (many, few) for way in WAYS}
    for _ in range(turns):
        for (folder, way), found in costs.items():
            found.append(measured(folder, way))
    middle = {key: medians(found) for key, found in costs.items()}
    for way in WAYS:
        a, b = middle[many, way], middle[few, way]
        limit = max(LIMIT * b.seconds, ANYWAY * count)
        print(
            f"write {way:5}  {count:,} tensors {a.seconds:.2f} s, {count // FEWER:,} {b.seconds:.2f} s: "
            f"{a.seconds / b.seconds:.2f} x, {a.seconds / count * 1e6:.0f} us a tensor, limit {limit:.2f} s: "
            f"{'ok' if a.seconds <= limit else 'MISSED'}; processor {a.processor:.2f} s and {b.processor:.2f} s; "
            f"memory {a.memory >> 20} MiB and {b.memory >> 20} MiB"
        )
    for folder in (many, few):
        ratio = middle[folder, "alone"].seconds / middle[folder, "base"].seconds
        print(f"write without a base / write --base, {folder.name}: {ratio:.2f} x (limit 1.3)")


def large(work: Path, size: int, *, whole: bool) -> None:
    """Memory for one large tensor."""
    folder = work / f"large-{size}-{'whole' if whole else 'one'}"
    if not folder.exists():
        generate_large(folder, size, whole=whole)
    for step in range(STEPS - 1):
        cost = run("alone", folder, step)
        print(f"write alone, step {step}: {cost.seconds:.2f} s, memory {cost.memory >> 20} MiB")
    for way in ("base", "cache"):
        cost = run(way, folder, STEPS - 1 if way == "base" else STEPS)
        print(f"write {way}: {cost.seconds:.2f} s, memory {cost.memory >> 20} MiB")
    for way, step in (("apply", 3), ("follow", 0), ("follow", 1), ("follow", 2), ("follow", 4), ("verify", 4)):
        cost = run(way, folder, step)
        print(f"{way}, step {step}: {cost.seconds:.2f} s, memory {cost.memory >> 20} MiB")


def sparse(work: Path, size: int, *, whole: bool) -> None:
    """The same of holes: writes, a cold apply and verify. What is not wanted any more is removed, for its room."""
    folder = work / f"sparse-{size}-{'whole' if whole else 'one'}"
    if not folder.exists():
        generate_sparse(folder, size, whole=whole)
    last = 1 if whole else 2
    for way, step in (("alone", 0), ("base", 1), ("alone", last), ("apply", last), ("verify", last)):
        if whole and (way, step) == ("base", 1):
            shutil.copytree(folder / "repo", folder / "kept", copy_function=os.link)
        if whole and (way, step) == ("alone", 1):
            shutil.rmtree(folder / "repo")
            (folder / "kept").rename(folder / "repo")
        if whole and way == "apply":
            shutil.rmtree(folder / "1")
        cost = run(way, folder, step)
        print(f"{way}, step {step}: {cost.seconds:.2f} s, memory {cost.memory >> 20} MiB", flush=True)
        shutil.rmtree(folder / "out", ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="*", default=[6000, 30000])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--large", type=int)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--sparse", action="store_true")
    parser.add_argument("--name-bytes", type=int, default=0)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child[0], Path(args.child[1]), int(args.child[2]))
        return
    work = args.work or Path(tempfile.mkdtemp(prefix="many-"))
    try:
        if args.large and args.sparse:
            sparse(work, args.large, whole=args.whole)
        elif args.large:
            large(work, args.large, whole=args.whole)
        for count in () if args.large else args.tensors:
            compare(work, count, args.turns, args.name_bytes)
    finally:
        if not args.keep:
            shutil.rmtree(work)


if __name__ == "__main__":
    main()
