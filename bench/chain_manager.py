"""What a long chain costs: storage a step, restoring a random step with and without folds, the graph at 10,000 steps.

    python bench/chain_manager.py [--steps 2000] [--long 10000] [--ratios 1.0 ...]

The chain is synthetic (as bench/synth.py's, two small tensors, moved on step by step); sizes are shares of one anchor,
since these carry over to models of any size and seconds do not. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from deltackpt.collector.retention import Policy
from deltackpt.collector.sweep import collect, plan_gc
from deltackpt.compaction.plan import plan_compact
from deltackpt.format.layout import Layout
from deltackpt.format.manifest import Counts, File, Link, Manifest
from deltackpt.format.safetensors_header import Tensor, build_header
from deltackpt.publish.write import AnchorPolicy, write
from deltackpt.report.log import log
from deltackpt.report.status import status
from deltackpt.repository import Repository
from deltackpt.store import LocalStore, MemoryStore, memory

SHAPE = (256, 512)
SPREAD, UPDATE = np.float32(0.02), np.float32(2.5e-7)  # as bench/synth.py: some 1 % of the elements change a step
SAMPLES = 40


def publish(url: str, folder: Path, steps: int, policy: AnchorPolicy) -> None:
    """A chain of bf16 checkpoints, each published from the directory of the one before."""
    rng = np.random.Generator(np.random.SFC64(0))
    masters = [rng.standard_normal(SHAPE, np.float32) * SPREAD for _ in range(2)]
    old: Path | None = None
    for step in range(steps):
        new = folder / str(step % 2)
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        arrays = [_bf16(m) for m in masters]
        ends = [sum(a.nbytes for a in arrays[: i + 1]) for i in range(len(arrays))]
        sizes = enumerate(zip(arrays, ends, strict=True))
        tensors = [Tensor(f"w{i}", "BF16", SHAPE, end - a.nbytes, end) for i, (a, end) in sizes]
        (new / "model.safetensors").write_bytes(build_header(tensors, {}) + b"".join(a.tobytes() for a in arrays))
        write(new, url, base=old, anchor=policy, threads=1)
        old = new
        for m in masters:
            m += np.clip(rng.standard_normal(SHAPE, np.float32), -2, 2) * UPDATE


def _bf16(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def restore(repo: Repository, samples: list[Link]) -> dict[str, float]:
    """What a cold start at a random step reads, in anchors and in objects."""
    whole = sum(f.size for f in repo.load(repo.steps()[0]).anchor or ())
    plans = [repo.resolve(link) for link in samples]
    sizes, hops = [plan.bytes / whole for plan in plans], [len(plan.patches) for plan in plans]
    found = {"mean": statistics.mean(sizes), "worst": max(sizes)}
    return {**found, "patches": statistics.mean(hops), "most_patches": max(hops)}


def catch_up(repo: Repository, links: list[Link]) -> dict[str, float]:
    """What a reader that is some steps behind reads, in patches."""
    found = {}
    for behind in (10, 100, 1000):
        if behind < len(links):
            plan = repo.resolve(links[-1], have=links[-1 - behind])
            found[str(behind)] = len(plan.patches)
    return found


def storage(repo: Repository, steps: int) -> dict[str, float]:
    whole = sum(f.size for f in repo.load(repo.steps()[0]).anchor or ())
    total = {"anchors": 0, "patches": 0, "folds": 0}
    for info in repo.store.list(""):
        folder = info.name.partition("/")[0]
        if folder in total:
            total[folder] += info.size
    return {"a step": sum(total.values()) / whole / steps, **{k: v / whole for k, v in total.items()}}


def measure(steps: int, ratio: float) -> dict[str, Any]:
    name = f"bench-{ratio}"
    memory._named[name] = MemoryStore(name)
    with tempfile.TemporaryDirectory() as folder:
        publish(f"memory://{name}", Path(folder), steps, AnchorPolicy(ratio=ratio))
    repo = Repository.open(f"memory://{name}")
    links = repo.steps()
    samples = random.Random(0).sample(links, min(SAMPLES, steps))
    row: dict[str, Any] = {"ratio": ratio, "storage": storage(repo, steps), "restore": restore(repo, samples)}
    row["catch_up"] = catch_up(repo, links)
    began = time.monotonic()
    done = plan_compact(repo, levels=(8, 64, 512)).execute(repo, threads=1)
    row["folds"] = {
        "made": sum(f.bytes is not None for f in done.folds),
        "not smaller": sum(f.bytes is None for f in done.folds),
        "seconds": time.monotonic() - began,
        "storage": storage(repo, steps),
        "restore": restore(repo, samples),
        "catch_up": catch_up(repo, links),
    }
    collect(repo, Policy(last=50, every=500, grace=0))
    row["after_gc"] = {"steps": len(repo.steps()), "storage": storage(repo, steps)}
    memory._named.pop(name)
    return row


def long_chain(root: Path, steps: int) -> dict[str, Any]:
    """Seconds on a chain of manifests alone; nothing that is timed here reads a payload."""
    store = LocalStore(root)
    identity, layout = "ab" * 16, Layout((), ()).encode()
    store.put("deltackpt.json", [b'{"format":"deltackpt","repository":"%s","version":1}' % identity.encode()])
    written = store.put("states/00000000-aaaaaaaaaaaa/layout.json", [layout])
    link, state = None, ""

    def put(name: str, size: int) -> File:
        path = root / name  # not through the store: it would sync ten thousand times
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
        return File(name, size, hashlib.sha256(bytes(size)).hexdigest())

    for step in range(steps):
        nonce = hashlib.sha256(b"%d" % step).hexdigest()
        base, state = (state or None), nonce
        manifest = Manifest(
            repository=identity,
            step=step,
            parent=link,
            base=base,
            state=state,
            anchor=(put(f"anchors/{step:08d}-{nonce[:12]}/m", 5_000),) if step % 100 == 0 else None,
            patch=(put(f"patches/{step:08d}-{nonce[:12]}/part-00001.safetensors", 100),) if link else None,
            layout=File(written.name, written.size, written.sha256),
            digests=put(f"states/{step:08d}-{nonce[:12]}/digests.safetensors", 10),
            counts=Counts(0, 0, 1, 10, 1),
            time=step,
            producer="bench",
        )
        raw = manifest.encode()
        link = Link(step, hashlib.sha256(raw).hexdigest())
        path = root / link.name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(raw)
    assert link is not None
    Repository.open(root).move_ref("main", None, link)
    work: dict[str, Callable[[Repository], object]] = {
        "log": lambda repo: log(repo),
        "resolve": lambda repo: repo.resolve(link),
        "gc plan": lambda repo: plan_gc(repo, Policy(last=50, every=500, grace=0)),
        "gc plan, all kept": lambda repo: plan_gc(repo, Policy(grace=0)),
        "status": lambda repo: status(repo),
    }
    found: dict[str, Any] = {}
    for name, run in work.items():
        repo = Repository.open(root)
        began, cpu = time.monotonic(), time.process_time()
        run(repo)
        found[name] = {"seconds": time.monotonic() - began, "cpu": time.process_time() - cpu}
    found["peak MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--long", type=int, default=10_000)
    parser.add_argument("--ratios", type=float, nargs="*", default=[1.0])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {"long": long_chain(Path(folder), args.long)} if args.long else {}
    found["chains"] = [measure(args.steps, ratio) for ratio in args.ratios] if args.steps else []
    print(json.dumps(found, indent=2), flush=True)


if __name__ == "__main__":
    main()
