"""Damaged parts on a card: nothing outside of the kernels' memory is touched, and defects are those the host names.

Bits are flipped, counts and bytes moved between tiles, behind right checksums so that all kernels meet them; every
buffer lies between guard words, and the words of the tensor have to stay as they were. Without a card the kernels are
interpreted: some tens a minute.

    python bench/gpu_damage.py [--count 100000] [--seconds 300] [--seed 1] [--dtype BF16 F32 U8 F8_E4M3]
    compute-sanitizer --tool memcheck python bench/gpu_damage.py --count 300      where the toolkit is there
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]

import numpy as np  # noqa: E402
from support.device_changes import WHERE, torch  # noqa: E402
from support.lists import pair, with_right_checksums  # noqa: E402

from deltackpt import kernels  # noqa: E402
from deltackpt.codecs.packed import codec, decoder, grid  # noqa: E402
from deltackpt.codecs.packed.jobs import DecodeJob  # noqa: E402
from deltackpt.errors import FormatError  # noqa: E402
from deltackpt.format.dtypes import DTYPES  # noqa: E402
from deltackpt.gpu.decode import DecodeTask, decode  # noqa: E402
from deltackpt.gpu.triton import crc, lists_scan, locate, step_back, unlist  # noqa: E402
from deltackpt.torch_views.words import from_host  # noqa: E402

SHAPE = (40, 36)
GUARD, EDGE = 85, 64  # the guard word, and how many lie at each end


class Guarding:
    """torch, for the kernels' modules: whatever they allocate lies between guard words."""

    def __init__(self) -> None:
        self.edges: list[tuple[Any, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def _make(self, shape: Any, dtype: Any, device: Any, fill: bool) -> Any:
        size = int(np.prod(shape))
        whole = torch.full((size + 2 * EDGE,), GUARD, dtype=dtype, device=device)
        inner = whole[EDGE : EDGE + size]
        if fill:
            inner.zero_()
        self.edges.append((whole[:EDGE], whole[EDGE + size :]))
        return inner.view(shape)

    def zeros(self, shape: Any, *, dtype: Any, device: Any) -> Any:
        return self._make(shape, dtype, device, True)

    def empty(self, shape: Any, *, dtype: Any, device: Any) -> Any:
        return self._make(shape, dtype, device, False)

    def empty_like(self, like: Any) -> Any:
        return self._make(like.shape, like.dtype, like.device, False)

    def whole(self) -> bool:
        """Are all guard words what they were? Those that were looked at are forgotten."""
        edges, self.edges = self.edges, []
        by_dtype: dict[Any, list[Any]] = {}
        for pair_ in edges:
            for edge in pair_:
                by_dtype.setdefault(edge.dtype, []).append(edge)
        return all(bool((torch.cat(some) == GUARD).all()) for some in by_dtype.values())


class Case:
    """A tensor, its changes encoded on the host."""

    def __init__(self, dtype: str, seed: int) -> None:
        self.dtype = dtype
        self.old, new = pair(dtype, SHAPE, seed, 250, "weights")
        at = np.flatnonzero(self.old != new)
        self.index, tiles = codec.encode(at, self.old[at], new[at], self.old, DTYPES[dtype], SHAPE)
        self.payload = b"".join(tiles)
        old = self.old if self.old.itemsize == 1 else self.old.view(f"<i{self.old.itemsize}")
        self.words = from_host(old, WHERE)
        self.before = self.words.clone()

    def damaged(self, rng: np.random.Generator) -> tuple[Any, bytes]:
        """An index and bytes with a defect, or without."""
        data, lengths, counts = bytearray(self.payload), self.index.lengths.copy(), self.index.counts.copy()
        kind = rng.integers(4)
        if kind == 0:
            for at in rng.integers(0, len(data), rng.integers(1, 4)):
                data[at] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            at = int(rng.integers(len(data)))
            data[at:] = bytes(rng.integers(0, 256, len(data) - at, np.uint8))
        elif kind == 2:
            counts[rng.integers(len(counts)), rng.integers(counts.shape[1])] += rng.choice([-3, -1, 1, 2, 40, 1 << 30])
        else:
            a, b = rng.integers(len(lengths), size=2)
            moved = min(int(rng.integers(1, 5)), int(lengths[a]))
            lengths[a] -= moved
            lengths[b] += moved
        job = DecodeJob(self.index, memoryview(self.payload), self.old, DTYPES[self.dtype], "here")
        return with_right_checksums(job, bytes(data), lengths=lengths, counts=counts).index, bytes(data)

    def host(self, index: Any, data: bytes) -> tuple[str, str] | None:
        try:
            decoder.decode(DecodeJob(index, memoryview(data), self.old, DTYPES[self.dtype], "here"))
        except FormatError as error:
            return error.code, error.where
        return None

    def card(self, index: Any, data: bytes) -> tuple[str, str] | None:
        task = DecodeTask(index, DTYPES[self.dtype], self.words, 0, len(data), "here")
        part = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(WHERE)
        try:
            list(decode([replace(task)], part))
        except FormatError as error:
            return error.code, error.where
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=300.0, help="no new one is begun after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", nargs="+", choices=sorted(DTYPES), default=["BF16", "F32", "U8", "F8_E4M3"])
    args = parser.parse_args()
    rng, guards, seen = np.random.default_rng(args.seed), Guarding(), Counter[str]()
    grid.CHANGES_PER_TILE, kernels.LIB = 64, None  # many tiles; the compiled kernels know the number of the format
    for module in (crc, lists_scan, locate, step_back, unlist):
        module.torch = guards  # type: ignore[attr-defined]
    cases = [Case(dtype, args.seed + i) for i, dtype in enumerate(args.dtype)]
    began, done, wrong = time.monotonic(), 0, list[str]()
    print(f"{WHERE}: {args.count:,} damages of {', '.join(args.dtype)}, at most {args.seconds:.0f} s", flush=True)
    while done < args.count and time.monotonic() - began < args.seconds and len(wrong) < 5:
        case = cases[done % len(cases)]
        index, data = case.damaged(rng)
        want, have = case.host(index, data), case.card(index, data)
        if want != have:
            wrong.append(f"{done}, {case.dtype}: the host says {want}, the card {have}")
        if not guards.whole():
            wrong.append(f"{done}, {case.dtype}: a guard word was written over")
        seen[want[0] if want else "none"] += 1
        done += 1
        if done % (2000 if WHERE == "cuda" else 20) == 0:
            print(f"{done:,} in {time.monotonic() - began:.0f} s, {dict(seen)}", flush=True)
    if any(not torch.equal(case.words, case.before) for case in cases):
        wrong.append("words of a tensor were written")
    print("\n".join([f"{done:,} damages, {len(wrong)} wrong: {dict(seen)}", *wrong]), flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
