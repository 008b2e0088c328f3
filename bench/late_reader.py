"""What a store that answers slowly makes of a long history: requests and seconds of `log` and of a late reader's plan.

    python bench/late_reader.py [--steps 2000] [--latency 0.1]

The store is in memory and takes so many seconds for every request, a thousand listed names being one; sixteen and more
may be under way at a time. The manifests are as large as real ones, and no payload is read. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from threading import Lock
from typing import Any

from deltackpt.compaction.packs import make_packs, plan_packs
from deltackpt.format.edge import Edge
from deltackpt.format.manifest import Counts, File, Link, Manifest
from deltackpt.report.log import log
from deltackpt.report.status import status
from deltackpt.repository import Repository
from deltackpt.store import MemoryStore, ObjectInfo

LEVELS = (8, 64, 512)


class SlowStore:
    """``inner`` over a long line; counts requests."""

    def __init__(self, inner: MemoryStore, latency: float) -> None:
        self._inner, self._latency, self._lock = inner, latency, Lock()
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in ("put", "get", "get_if_changed", "get_range", "stat", "swap", "delete"):
            return found

        def ask(*args: Any) -> Any:
            self._wait(1)
            return found(*args)

        return ask

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """A request for each thousand names."""
        found = [*self._inner.list(prefix)]
        self._wait(max(1, -(-len(found) // 1000)))
        yield from found

    def _wait(self, requests: int) -> None:
        with self._lock:
            self.requests += requests
        time.sleep(requests * self._latency)


def history(steps: int) -> tuple[MemoryStore, list[Link]]:
    """A chain of manifests alone, an anchor every 500 steps, and the edges that `compact --levels` makes."""
    store, identity = MemoryStore(), "ab" * 16
    store.put("deltackpt.json", [b'{"format":"deltackpt","repository":"%s","version":1}' % identity.encode()])
    links: list[Link] = []
    for step in range(steps + 1):
        sha = hashlib.sha256(b"%d" % step).hexdigest()
        at = f"{step:08d}-{sha[:12]}"
        made = Manifest(
            repository=identity,
            step=step,
            parent=links[-1] if links else None,
            base=hashlib.sha256(b"%d" % (step - 1)).hexdigest() if links else None,
            state=sha,
            anchor=(File(f"anchors/{at}/model.safetensors", 16 << 30, sha),) if step % 500 == 0 else None,
            patch=(File(f"patches/{at}/part-00001.safetensors", 40 << 20, sha),) if links else None,
            layout=File("states/00000000-aaaaaaaaaaaa/layout.json", 40_000, sha),
            digests=File(f"states/{at}/digests.safetensors", 10_000, sha),
            counts=Counts(0, 0, 290, 8_030_261_248, 40_000_000),
            time=1_700_000_000 + 30 * step,
            producer="deltackpt bench",
        )
        store.put(made.link.name, [made.encode()])
        links.append(made.link)
        for level in LEVELS:
            if step and step % level == 0:
                files = (File(f"folds/{at}/part-{level:05d}.safetensors", level * (30 << 20), sha),)
                edge = Edge(identity, links[step - level], links[step], files, "bench", 0)
                store.put(edge.name, [edge.encode()])
    Repository(store, identity).move_ref("main", None, links[-1])
    return store, links


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--latency", type=float, default=0.1)
    args = parser.parse_args()
    store, links = history(args.steps)
    work: dict[str, Callable[[Repository], object]] = {
        "log": lambda repo: log(repo),
        "log -n 20": lambda repo: log(repo, limit=20),
        "plan of a reader that is behind": lambda repo: repo.resolve(links[-1], have=links[0]),
        "plan of a reader without anything": lambda repo: repo.resolve(links[-1]),
        "status": lambda repo: status(repo),
    }
    found: dict[str, Any] = {"steps": args.steps, "latency": args.latency}
    for how in ("without packs", "with packs"):
        if how == "with packs":
            repo = Repository.at(store)
            found["packs"] = [pack.bytes for pack in make_packs(repo, plan_packs(repo))]
        for name, run in work.items():
            slow = SlowStore(store, args.latency)
            began = time.monotonic()
            run(Repository.at(slow))
            row = {"seconds": round(time.monotonic() - began, 2), "requests": slow.requests}
            found.setdefault(name, {})[how] = row
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
