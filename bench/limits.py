"""The limits of a host and of the format, by the command, each call a process of its own: does it work, what it costs.

- shards: 100 shards of a few tensors each, with 64 descriptors (`ulimit -n 64`, which no process may raise)
- names: 90,000 tensors with names of 200 bytes, in 22 shards, and in one; of ASCII, and of UTF-8 beyond it

Of each call: seconds, processor seconds, and the anonymous memory of the process at its highest, all of it, idle
included; a call that fails is shown with what it said. What comes back is compared with what was written, byte by byte.

    python bench/limits.py [--only shards names] [--tensors 90000] [--shards 22 1] [--letters ascii|wide] [--work DIR]
"""

from __future__ import annotations

import argparse
import filecmp
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

DESCRIPTORS, SHARDS, IN_SHARD = 64, 100, 20
NAME_BYTES = 200
NEVER = ("--anchor-when-ratio", "inf")


def names(count: int, *, ascii_only: bool) -> Iterator[str]:
    """Of `NAME_BYTES` bytes, or half of what is behind the usual name letters of two bytes."""
    for i in range(count):
        head = f"model.layers.{i // 768}.mlp.experts.{i // 3 % 256}.{('down', 'gate', 'up')[i % 3]}_proj.weight."
        wide = 0 if ascii_only else (NAME_BYTES - len(head)) // 4
        yield head + "é" * wide + "x" * (NAME_BYTES - len(head) - 2 * wide)


def generate(out: Path, steps: int, every: Sequence[str], shards: int, shape: tuple[int, int]) -> list[Path]:
    """Checkpoints of bf16 tensors, 1 % of whose elements change a step."""
    elements, made, weight_map = shape[0] * shape[1], np.array_split(np.array(every, object), shards), {}
    for step in range(steps):
        (out / str(step)).mkdir(parents=True)
    for number, some in enumerate(made):
        path, size = f"model-{number + 1:05d}-of-{shards:05d}.safetensors", 2 * elements
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for i, name in enumerate(some):
            entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [i * size, (i + 1) * size]}
            weight_map[name] = path
        head = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        head += b" " * (-len(head) % 8)
        rng = np.random.default_rng(number)
        bits = rng.integers(0x3C00, 0x3D00, len(some) * elements, np.uint16)
        for step in range(steps):
            if step:
                bits[rng.integers(0, len(bits), len(bits) // 100)] += np.uint16(1)
            with (out / str(step) / path).open("wb") as file:
                file.write(len(head).to_bytes(8, "little") + head)
                file.write(bits.data)
    for step in range(steps):
        (out / str(step) / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return [out / str(step) for step in range(steps)]


def anonymous(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")), 0)


def call(descriptors: int | None, *args: object) -> bool:
    """One command; what it cost is printed. -> did it work?"""

    def few() -> None:
        if descriptors:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    command = [sys.executable, "-m", "deltackpt_cli", *map(str, args), "--quiet"]
    before, began, peak = os.times(), time.monotonic(), 0
    with tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=err, preexec_fn=few)
        while process.poll() is None:
            peak = max(peak, anonymous(process.pid))
            time.sleep(0.005)
        seconds, after = time.monotonic() - began, os.times()
        err.seek(0)
        said = " ".join(err.read().split())[:300]
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    what = " ".join(a.name if isinstance(a, Path) else str(a) for a in args)
    verdict = "ok" if process.returncode == 0 else f"FAILED, {process.returncode}: {said}"
    print(f"{what:44} {seconds:7.2f} s {processor:7.2f} s {peak >> 20:6} MiB  {verdict}", flush=True)
    return process.returncode == 0


def same(a: Path, b: Path) -> str:
    """Are all files of two directories the same bytes?"""
    left, right = ({p.name: p for p in folder.iterdir() if p.is_file()} for folder in (a, b))
    found = left.keys() == right.keys() and all(filecmp.cmp(left[n], right[n], shallow=False) for n in left)
    return "the same bytes" if found else "OTHER BYTES"


def every_way(work: Path, folders: list[Path], descriptors: int | None) -> None:
    """All that moves a step."""
    repo, remote, pulled, cache, out = (work / name for name in ("repo", "remote", "pulled", "cache", "out"))
    a, b, c = folders
    for args in (
        ("write", a, repo),
        ("write", b, repo, "--base", a, *NEVER),
        ("apply", repo, cache, "--cache"),
        ("write", c, repo, *NEVER),
        ("apply", repo, cache, "--cache"),
        ("apply", repo, out),
        ("diff", a, b),
        ("verify", repo),
        ("inspect", repo),
        ("push", repo, remote),
        ("pull", pulled, remote),
        ("verify", pulled),
    ):
        call(descriptors, *args)
    for folder in (out, cache / "current"):
        print(f"{folder.name}: {same(folder, c) if folder.exists() else 'MISSING'}", flush=True)
    for folder in (repo, remote, pulled, cache, out):
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=("shards", "names"), default=["shards", "names"])
    parser.add_argument("--tensors", type=int, default=90_000)
    parser.add_argument("--shards", type=int, nargs="*", default=[22, 1])
    parser.add_argument("--letters", choices=("ascii", "wide"))
    parser.add_argument("--work", type=Path)
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="deltackpt-limits-", dir=args.work))
    try:
        if "shards" in args.only:
            every = list(names(SHARDS * IN_SHARD, ascii_only=True))
            print(f"{SHARDS} shards of {IN_SHARD} tensors, {DESCRIPTORS} descriptors", flush=True)
            every_way(work, generate(work / "shards", 3, every, SHARDS, (64, 256)), DESCRIPTORS)
        letters = [kind for kind in ("ascii", "wide") if kind == (args.letters or kind)]
        for kind, shards in itertools.product(letters, args.shards) if "names" in args.only else ():
            every = list(names(args.tensors, ascii_only=kind == "ascii"))
            print(f"{args.tensors:,} tensors with {kind} names of {NAME_BYTES} bytes in {shards} shards", flush=True)
            every_way(work, generate(work / "names", 3, every, shards, (16, 64)), None)
            shutil.rmtree(work / "names")
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
