"""What a step costs a reader by the tensor: small tensors against the same bytes in a hundredth as many.

bf16 tensors of 64 x 256 under the names of DeepSeek's experts, in shards of at most 4,096, or as wide and a hundred
times as high; some 1 % of the elements change a step. An anchor and patches are published once; then `apply --cache`
(of the last step, by patching), a cold `apply`, `verify`, `inspect` and `log` run by turns on the few and the many,
each in a process of its own, and `cp -r` of the checkpoint beside them. Seconds are those of the call; memory is what
the kernel counts as anonymous, above what the process had before it: pages of files are not in it.

    python bench/many_apply.py [--tensors 6000 30000] [--patches 3] [--turns 3] [--work DIR] [--keep]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

WIDTH, HEIGHT, FEWER = 256, 64, 100
IN_SHARD = 4096  # small tensors
WAYS = ("cache", "apply", "verify", "inspect", "log")
LIMIT, ANYWAY = 1.5, 20e-6  # times the few's, or seconds a tensor where that is more


def name(i: int) -> str:
    """As DeepSeek has them."""
    return f"model.layers.{i // 768}.mlp.experts.{i // 3 % 256}.{('down', 'gate', 'up')[i % 3]}_proj.weight"


def head_of(names: list[str], height: int) -> bytes:
    size = 2 * height * WIDTH
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for i, key in enumerate(names):
        entries[key] = {"dtype": "BF16", "shape": [height, WIDTH], "data_offsets": [i * size, (i + 1) * size]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def generate(out: Path, count: int, height: int, steps: int) -> None:
    """The checkpoints of all steps, ``out/0`` and on."""
    every = [name(i) for i in range(count)]
    shards = [every[first : first + IN_SHARD] for first in range(0, count, IN_SHARD)]
    paths = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    weight_map = {key: path for path, names in zip(paths, shards, strict=True) for key in names}
    for step in range(steps + 1):
        (out / str(step)).mkdir(parents=True)
        (out / str(step) / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for number, (path, names) in enumerate(zip(paths, shards, strict=True)):
        rng, elements = np.random.default_rng(number), len(names) * height * WIDTH
        values = rng.standard_normal(elements, np.float32) * np.float32(0.02)
        bits = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        for step in range(steps + 1):
            if step:
                bits[rng.integers(0, elements, elements // 100)] += np.uint16(1)
            with (out / str(step) / path).open("wb") as file:
                file.write(head_of(names, height))
                file.write(bits.data)


def publish(folder: Path, steps: int) -> None:
    from deltackpt.publish.write import AnchorPolicy, write

    never = AnchorPolicy(ratio=float("inf"))
    for step in range(steps + 1):
        write(folder / str(step), folder / "repo", base=folder / str(step - 1) if step else None, anchor=never)


def anonymous() -> int:
    """Bytes of this process that are pages of no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    return 0


def work(way: str, folder: Path, steps: int) -> Callable[[], object]:
    """What is measured; what it needs beforehand is done here."""
    from deltackpt.cache import apply_to_cache
    from deltackpt.report.inspection import inspect_step
    from deltackpt.report.log import log
    from deltackpt.repository import Repository
    from deltackpt.restore.materialize import apply
    from deltackpt.verification import verify_repository

    repo = Repository.open(folder / "repo")
    if way == "cache":
        shutil.rmtree(folder / "cache", ignore_errors=True)
        for step in range(steps):
            apply_to_cache(Repository.open(folder / "repo"), folder / "cache", step)
        return lambda: apply_to_cache(repo, folder / "cache")
    if way == "apply":
        shutil.rmtree(folder / "out", ignore_errors=True)
        return lambda: apply(repo, folder / "out")
    calls: dict[str, Callable[[], object]] = {
        "verify": lambda: verify_repository(repo),
        "inspect": lambda: inspect_step(repo),
        "log": lambda: log(repo),
    }
    return calls[way]


def child(way: str, folder: Path, steps: int) -> None:
    """One call; what it cost goes to stdout."""
    call = work(way, folder, steps)
    idle, peak, over = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.005):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began, spent = time.monotonic(), time.process_time()
    call()
    seconds, processor = time.monotonic() - began, time.process_time() - spent
    over.set()
    watcher.join()
    print(json.dumps({"seconds": seconds, "processor": processor, "memory": max(0, peak - idle)}))


def run(way: str, folder: Path, steps: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", way, str(folder), str(steps)]
    cost: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return cost


def copy(folder: Path, steps: int) -> float:
    """Seconds of `cp -r` of the last checkpoint."""
    shutil.rmtree(folder / "copy", ignore_errors=True)
    began = time.monotonic()
    subprocess.run(["cp", "-r", folder / str(steps), folder / "copy"], check=True)
    return time.monotonic() - began


def measure(root: Path, tensors: int, steps: int, turns: int) -> None:
    folders = [root / f"{tensors // FEWER}", root / f"{tensors}"]
    for folder, count, height in zip(folders, (tensors // FEWER, tensors), (FEWER * HEIGHT, HEIGHT), strict=True):
        if not (folder / "repo").exists():
            generate(folder, count, height, steps)
            publish(folder, steps)
    copies = [copy(folders[1], steps) for _ in range(turns)]
    print(f"{tensors:,} tensors against {tensors // FEWER:,}, {steps} patches; medians of {turns} turns")
    print(f"{'':10}{'few, s':>10}{'many, s':>10}{'ratio':>8}{'cpu few':>10}{'cpu many':>10}{'ratio':>8}{'MB':>8}")
    for way in WAYS:
        costs = [[run(way, folder, steps) for folder in folders] for _ in range(turns)]
        few, many = ({k: statistics.median(turn[i][k] for turn in costs) for k in costs[0][i]} for i in (0, 1))
        clock, cpu = (statistics.median(b[k] / a[k] for a, b in costs) for k in ("seconds", "processor"))
        reached = cpu <= LIMIT or many["processor"] <= ANYWAY * tensors
        row = f"{way:10}{few['seconds']:10.3f}{many['seconds']:10.3f}{clock:8.2f}"
        row += f"{few['processor']:10.3f}{many['processor']:10.3f}{cpu:8.2f}{many['memory'] / 1e6:8.0f}"
        print(f"{row}  {'ok' if reached else 'MISSED'}", flush=True)
    print(f"{'cp -r':20}{statistics.median(copies):10.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="+", default=[6000, 30000])
    parser.add_argument("--patches", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--keep", action="store_true", help="Leave the work folder for the next run.")
    args = parser.parse_args()
    root = args.work or Path(tempfile.mkdtemp(prefix="deltackpt-many-"))
    try:
        for tensors in args.tensors:
            measure(root, tensors, args.patches, args.turns)
    finally:
        if not args.keep:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
