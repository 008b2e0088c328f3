"""What a store in between costs: an S3 server on loopback, ratios in one run.

    python bench/sync.py [--scale 0.35] [--turns 5] [--behind 50] [--flips] [--only publish anchor behind link] ...

- publish, follow: a step through the server, less the same step through a store in memory, against a plain put or get
  of the same bytes by the same client.
- anchor: the same of a whole checkpoint, to publish as a first step and to take into an empty cache.
- behind: a cache that many steps are missing from, against reading the manifests and parts of these steps.
- link: from a step's publication to a switched cache through a proxy that lets 100 MB a second pass, against a copy of
  the whole checkpoint through it.

The model is bench/synth.py's; --scale 1 is the 1.2 GB one, and --checkpoints uses what was generated before.
The server is moto's, in a process of its own (bench/s3_server.py); so is the proxy. Prints one JSON object a figure.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from synth import generate

from deltackpt.cache import apply_to_cache
from deltackpt.format.safetensors_header import Tensor, build_header
from deltackpt.publish.write import AnchorPolicy, write
from deltackpt.repository import Repository
from deltackpt.repository.writer_lease import writer_lease
from deltackpt.restore.journal import Journal
from deltackpt.store import LocalStore, MemoryStore, memory
from deltackpt.store.fsspec_store import open_fsspec
from deltackpt.sync.follow import Follower, FollowOptions
from deltackpt.sync.rate import Rate

NEVER = AnchorPolicy(ratio=float("inf"))
LINK = 100e6  # bytes a second
COLUMNS, TENSORS = 2048, 4
SPREAD, UPDATE = np.float32(0.02), np.float32(2.5e-7)  # as bench/synth.py: some 1 % of the elements change a step


@contextmanager
def s3_server() -> Iterator[str]:
    """moto's server; what a user sets in the environment to reach it is set."""
    port = free_port()
    command = [sys.executable, str(Path(__file__).with_name("s3_server.py")), str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(port)
            os.environ.update(
                AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}",
                AWS_DEFAULT_REGION="us-east-1",
                AWS_ACCESS_KEY_ID="bench",
                AWS_SECRET_ACCESS_KEY="bench",
            )
            client().call_s3("create_bucket", Bucket="bench")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


@contextmanager
def capped(url: str, limit: float) -> Iterator[str]:
    """The same server behind a link of ``limit`` bytes a second each way."""
    port, upstream = free_port(), int(url.rpartition(":")[2])
    process = multiprocessing.get_context("spawn").Process(target=relay, args=(port, upstream, limit), daemon=True)
    process.start()
    try:
        wait_for(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()


def relay(port: int, upstream: int, limit: float) -> None:
    up, down = Rate(limit), Rate(limit)

    def pump(source: socket.socket, sink: socket.socket, rate: Rate) -> None:
        try:
            while data := source.recv(128 << 10):
                rate.acquire(len(data))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()
            sink.close()

    with socket.create_server(("127.0.0.1", port)) as server:
        while True:
            near, _ = server.accept()
            far = socket.create_connection(("127.0.0.1", upstream))
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=pump, args=(near, far, up), daemon=True).start()
            threading.Thread(target=pump, args=(far, near, down), daemon=True).start()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def wait_for(port: int) -> None:
    for _ in range(300):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"nothing listens at port {port}")


def client(url: str | None = None) -> Any:
    """A plain client, as deltackpt makes its own."""
    import s3fs

    from deltackpt.store.retry import DEFAULT
    from deltackpt.store.s3 import options

    return s3fs.S3FileSystem(endpoint_url=url, skip_instance_cache=True, **options(DEFAULT))


def timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def in_memory(name: str) -> str:
    memory._named[name] = MemoryStore(name)
    return f"memory://{name}"


def objects(repo: Repository, step: int) -> list[str]:
    """The objects that a follower reads for a step."""
    manifest = repo.load(repo.find(step))
    return [f.name for f in (*(manifest.patch or ()), manifest.digests)] + [manifest.link.name]


def publish_and_follow(work: Path, folders: list[Path], turns: int) -> Iterator[dict[str, Any]]:
    """Each turn publishes a step to both stores and takes it in from both; the plain client moves the same bytes.

    Writers and followers are what they are in a run: they keep their store open, as the plain client does, and a
    writer its lease, as a trainer does.
    """
    with ExitStack() as stack:
        yield from _publish_and_follow(work, folders, turns, stack)


def _publish_and_follow(work: Path, folders: list[Path], turns: int, stack: ExitStack) -> Iterator[dict[str, Any]]:
    urls = {"server": "s3://bench/publish", "memory": in_memory("publish")}
    repos, followers = {}, {}
    for place, url in urls.items():
        write(folders[0], url)
        repos[place] = Repository.open(url)
        stack.enter_context(writer_lease(repos[place]))
        followers[place] = Follower(Repository.open(url), work / place)
        followers[place].catch_up()
    fs = client()
    rows: list[dict[str, float]] = []
    for turn in range(turns):
        old, new = (folders[i] for i in ((0, 1), (1, 0))[turn % 2])
        row: dict[str, float] = {}
        for place in urls if turn // 2 % 2 else reversed(urls):  # who comes second finds the files in the cache
            row[f"publish {place}"] = timed(partial(write, new, repos[place], base=old, anchor=NEVER))
            row[f"follow {place}"] = timed(followers[place].catch_up)
        repo = repos["server"]
        names = objects(repo, turn + 1)
        bodies = [repo.store.get(name, 1 << 30) for name in names]
        pairs = list(zip(names, bodies, strict=True))
        row["put"] = timed(lambda p=pairs, t=turn: [fs.pipe_file(f"bench/plain/{t}/{n}", b) for n, b in p])
        row["get"] = timed(lambda t=turn, n=names: [fs.cat_file(f"bench/plain/{t}/{name}") for name in n])
        row["bytes"] = sum(map(len, bodies))
        if turn >= 2:  # the first two make the slots, and load what is loaded once
            rows.append(row)
    for what, plain in (("publish", "put"), ("follow", "get")):
        median = {k: statistics.median(r[k] for r in rows) for k in rows[0]}
        extra = [(r[f"{what} server"] - r[f"{what} memory"]) / r[plain] for r in rows]
        whole = [r[f"{what} server"] / (r[f"{what} memory"] + r[plain]) for r in rows]
        seconds = {k: round(v, 4) for k, v in median.items() if what in k or k == plain}
        ratio = statistics.median(extra)
        yield {
            "figure": f"{what}: what the server adds / plain {plain}",
            "ratio": round(ratio, 2),
            "required": 1.2,
            "with the work itself": round(statistics.median(whole), 3),
            "bytes": int(median["bytes"]),
            "seconds": seconds,
        }


def anchor(work: Path, checkpoint: Path) -> Iterator[dict[str, Any]]:
    urls = {"server": "s3://bench/anchor", "memory": in_memory("anchor")}
    fs, shards = client(), sorted(checkpoint.glob("*.safetensors"))
    put = timed(lambda: [fs.put_file(str(path), f"bench/whole/{path.name}") for path in shards])
    publish = {place: timed(partial(write, checkpoint, url)) for place, url in urls.items()}
    (work / "got").mkdir()
    get = timed(lambda: [fs.get_file(f"bench/whole/{path.name}", str(work / "got" / path.name)) for path in shards])
    follow = {}
    for place, url in urls.items():
        follow[place] = timed(Follower(Repository.open(url), work / f"anchor-{place}").catch_up)
    for what, times, plain in (("publish", publish, put), ("follow", follow, get)):
        yield {
            "figure": f"{what} a whole checkpoint: what the server adds / plain {'put' if plain is put else 'get'}",
            "ratio": round((times["server"] - times["memory"]) / plain, 2),
            "required": 1.2,
            "with the work itself": round(times["server"] / (times["memory"] + plain), 3),
            "bytes": sum(path.stat().st_size for path in shards),
            "seconds": {"plain": round(plain, 2), **{k: round(v, 2) for k, v in times.items()}},
        }


def chain(folder: Path, url: str, steps: int, shape: tuple[int, int], *, flips: bool = False) -> None:
    """A chain of small checkpoints, each published from the directory of the one before; with ``flips`` one element of
    a hundred changes its last bit, which takes a tenth of the time to make."""
    rng = np.random.Generator(np.random.SFC64(0))
    masters = [rng.standard_normal(shape, np.float32) * SPREAD for _ in range(TENSORS)]
    arrays = [_bf16(m) for m in masters]
    old: Path | None = None
    for step in range(steps + 1):
        new = folder / str(step % 2)
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        sizes = [(i * a.nbytes, (i + 1) * a.nbytes) for i, a in enumerate(arrays)]
        tensors = [Tensor(f"w{i}", "BF16", shape, *size) for i, size in enumerate(sizes)]
        (new / "model.safetensors").write_bytes(build_header(tensors, {}) + b"".join(a.tobytes() for a in arrays))
        write(new, url, base=old, anchor=NEVER)
        old = new
        for m, a in zip(masters, arrays, strict=True):
            if flips:
                a.reshape(-1)[rng.integers(0, a.size, a.size // 100)] ^= np.uint16(1)
            else:
                m += np.clip(rng.standard_normal(shape, np.float32), -2, 2) * UPDATE
                a[:] = _bf16(m)


def _bf16(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def behind(work: Path, steps: int, turns: int, rows: int, *, flips: bool = False) -> Iterator[dict[str, Any]]:
    url, local = "s3://bench/behind", LocalStore(work / "chain")
    chain(work / "steps", str(work / "chain"), steps + 1, (rows, COLUMNS), flips=flips)
    for info in local.list(""):  # the order does not matter where nobody looks yet
        open_fsspec(url).put(info.name, local.read(info.name))
    repo = Repository.open(url)
    for step in (0, 1):
        apply_to_cache(repo, work / "start", step)
    manifests = [repo.find(step).name for step in range(2, steps + 2)]
    names = [name for step in range(2, steps + 2) for name in objects(repo, step) if name.startswith("patches/")]
    size = sum(repo.store.stat(name).size for name in names)
    catching, reading, reading_all = [], [], []

    def read(some: list[str]) -> list[int]:
        return [len(chunk) for name in some for chunk in repo.store.read(name)]

    for turn in range(turns):
        shutil.copytree(work / "start", work / f"cache-{turn}", symlinks=True)
        reading.append(timed(partial(read, names)))
        reading_all.append(timed(partial(read, manifests + names)))
        follower = Follower(Repository.open(url), work / f"cache-{turn}")
        catching.append(timed(follower.catch_up))
    journal = Journal.read(work / f"cache-{turns - 1}" / "journal")
    assert journal is not None
    written = sum(len(r.values) for i in range(TENSORS) for r in journal.of(i))
    old, new = (_elements(work / f"cache-{turns - 1}", repo, step, TENSORS * rows * COLUMNS) for step in (1, steps + 1))
    ratio, strict = (
        statistics.median(c / r for c, r in zip(catching, base, strict=True)) for base in (reading_all, reading)
    )
    yield {
        "figure": f"{steps} steps behind / reading their bytes, manifests and parts one after the other",
        "ratio": round(ratio, 2),
        "required": 1.3,
        "of the parts alone": round(strict, 2),
        "elements written": written,
        "elements that differ": int(np.count_nonzero(old != new)),
        "bytes": size,
        "seconds": {
            "catch up": round(statistics.median(catching), 3),
            "read": round(statistics.median(reading_all), 3),
            "read parts": round(statistics.median(reading), 3),
        },
    }


def _elements(cache: Path, repo: Repository, step: int, elements: int) -> np.ndarray:
    link = repo.find(step)
    body = (cache / f"{link.step:08d}-{link.id}" / "model.safetensors").read_bytes()
    return np.frombuffer(body, np.uint16)[-elements:]


def take(follower: Follower) -> None:
    if (switch := follower.catch_up()) is not None:
        follower.acknowledge(switch)


def link(work: Path, folders: list[Path], server: str, turns: int) -> Iterator[dict[str, Any]]:
    """Each turn publishes a step twice: to a follower that patches the old slot when the step comes, and to one that
    brought it along before (`ready`), as soon as nobody read it."""
    url = "s3://bench/link"
    write(folders[0], url)
    with capped(server, LINK) as narrow:
        os.environ["AWS_ENDPOINT_URL"] = narrow
        fs, cache = client(narrow), work / "link"
        repo = Repository.open(url)
        apply_to_cache(repo, cache)
        write(folders[1], url, base=folders[0], anchor=NEVER)
        repo, rows = Repository.open(url), []
        followers = {"usual": Follower(repo, cache), "ready": Follower(repo, cache, FollowOptions(standby=True))}
        take(followers["usual"])
        for turn in range(2 * turns):
            how, (new, old) = ("usual", folders) if turn % 2 == 0 else ("ready", folders[::-1])
            row = {"prepare": timed(followers[how].prepare)}
            os.sync()  # as where steps take a while: what was brought along is on the disk by then
            row["publish"] = timed(partial(write, new, url, base=old, anchor=NEVER))
            row["switch"] = timed(partial(take, followers[how]))
            rows.append(row)
        out = work / "copied"
        out.mkdir()
        names = [f"bench/link/{f.name}" for f in repo.load(repo.find(0)).anchor or ()]
        copy = timed(lambda: [fs.get_file(name, str(out / Path(name).name)) for name in names])
        size = sum(p.stat().st_size for p in out.iterdir())
        os.environ["AWS_ENDPOINT_URL"] = server
    for first, how in ((1, "follow --ready"), (0, "follow")):
        median = {k: statistics.median(row[k] for row in rows[first::2]) for k in rows[0]}
        yield {
            "figure": f"link of 100 MB/s, {how}: copy of the checkpoint / published step to switched cache",
            "ratio": round(copy / median["switch"], 1),
            "required": 40 if first else None,
            "with the publishing itself": round(copy / (median["publish"] + median["switch"]), 1),
            "bytes": size,
            "seconds": {"copy": round(copy, 2), **{k: round(v, 3) for k, v in median.items()}},
            "switches": [round(row["switch"], 3) for row in rows[first::2]],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=0.35)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--behind", type=int, default=50)
    parser.add_argument("--rows", type=int, default=1024, help="of each of the four tensors of `behind`")
    parser.add_argument("--flips", action="store_true", help="a chain for `behind` that is made faster")
    parser.add_argument("--only", nargs="*", default=["publish", "anchor", "behind", "link"])
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--work", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.work) as folder, s3_server() as server:
        work = Path(folder)
        folders = sorted(args.checkpoints.glob("step_*"))[:2] if args.checkpoints else []
        if not folders and {"publish", "follow", "anchor", "link"} & {*args.only}:
            folders = generate(work / "checkpoints", 1, scale=args.scale)
        figures: list[Iterator[dict[str, Any]]] = []
        if {"publish", "follow"} & {*args.only}:
            figures.append(publish_and_follow(work, folders, args.turns + 2))
        if "anchor" in args.only:
            figures.append(anchor(work, folders[0]))
        if "behind" in args.only:
            figures.append(behind(work, args.behind, min(3, args.turns), args.rows, flips=args.flips))
        if "link" in args.only:
            figures.append(link(work, folders, server, min(3, args.turns)))
        for figure in figures:
            for row in figure:
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
