"""What signing adds to a step, and asking for signatures to reading one.

    python bench/sign.py [--steps N]

In a folder: a chain of manifests alone, so that nothing else takes time. Aim: under 5 ms a step on either side.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rows import Row, machine, table

from deltackpt.format.manifest import Counts, File, Link, Manifest
from deltackpt.format.signature import KeySet, SignedStatement, Statement, decode_signature
from deltackpt.repository import Repository
from deltackpt.signing.ed25519 import verify
from deltackpt.signing.keys import PrivateKey
from deltackpt.signing.policy import TrustPolicy

LIMIT = 5.0  # ms
REPEAT = 300


def took(work: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)


def manifest(repo: Repository, before: Manifest | None) -> Manifest:
    """A step of no content, after ``before``."""
    file = File("states/00000000-000000000000/layout.json", 1, "0" * 64)
    step = 0 if before is None else before.step + 1
    parent, base = (before.link, before.state) if before else (None, None)
    state = f"{step:064x}"
    return Manifest(repo.id, step, parent, base, state, (file,), None, file, file, Counts(), step, "bench")


def publish(repo: Repository, steps: int) -> list[float]:
    """Milliseconds of each publish: the manifest, its signature if there is one, and the ref."""
    times = []
    head = repo.ref()
    last = repo.load(head.link) if head else None
    for _ in range(steps):
        new, old = manifest(repo, last), repo.ref()
        times.append(took(lambda new=new, old=old: repo.publish(new, "main", old)))  # type: ignore[misc]
        last = new
    return times


def read(writer: Repository, reader: Repository, steps: int) -> list[float]:
    """Milliseconds of each look at a branch that moved."""
    times = []
    for _ in range(steps):
        publish(writer, 1)
        times.append(took(reader.ref))
    return times


def computing() -> list[Row]:
    """Processor time alone: what a busy disk does not change."""
    key, times = PrivateKey.generate(), []
    said = Statement("ab" * 16, "refs/main", Link(2, "cd" * 32), Link(1, "ef" * 32), 10**15)
    raw = SignedStatement(said, key(said.encode())).encode()

    def check() -> bool:
        found = decode_signature(raw, "bench")
        return verify(found.by, found.statement.encode())

    for work in (lambda: SignedStatement(said, key(said.encode())).encode(), check):
        began = time.process_time()
        for _ in range(REPEAT):
            assert work()
        times.append(1e3 * (time.process_time() - began) / REPEAT)
    detail = f"processor time, mean of {REPEAT}; an object of {len(raw)} bytes"
    return [
        Row("computing to sign a step", times[0], "ms", detail, LIMIT),
        Row("computing to check a signature", times[1], "ms", detail, LIMIT),
    ]


def rows(steps: int, folder: Path) -> list[Row]:
    """Each figure is the difference of two medians, of steps that are signed and of those that are not."""
    os.environ["DELTACKPT_TRUST_DIR"] = str(folder / "memory")
    key = PrivateKey.generate()
    plain = Repository.open_or_create(folder / "plain")
    signed = Repository.open_or_create(folder / "signed").secure(sign=key)
    without, withal = [], []
    for _ in range(steps // 10):  # in turns, so that both see the same machine
        without += publish(plain, 10)
        withal += publish(signed, 10)
    policy = TrustPolicy(KeySet(None, 0, (key.public,)), max_age=3600)
    trusting = Repository.open(folder / "signed").secure(policy)
    a, b = statistics.median(without), statistics.median(withal)
    looks, proven = read(plain, Repository.open(folder / "plain"), steps), read(signed, trusting, steps)
    c, d = statistics.median(looks), statistics.median(proven)
    detail = "median {:.2f} ms, {:.2f} ms unsigned; worst {:.2f} and {:.2f} ms; " + f"{steps} steps in a folder"
    said = detail.format(b, a, max(withal), max(without)), detail.format(d, c, max(proven), max(looks))
    return [
        Row("signing adds to a step", b - a, "ms", said[0], LIMIT),
        Row("asking for signatures adds to a look", d - c, "ms", said[1], LIMIT),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    with tempfile.TemporaryDirectory() as folder:
        print(machine())
        print(table(computing() + rows(parser.parse_args().steps, Path(folder))))


if __name__ == "__main__":
    main()
