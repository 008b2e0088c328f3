"""Changes for tests of `packed`: elements by a formula, so that vectors of their bytes hold on every machine."""

from __future__ import annotations

import zlib
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from deltackpt.codecs.packed.jobs import DecodeJob, EncodeJob
from deltackpt.codecs.packed.list_index import ListIndex
from deltackpt.format.dtypes import DTYPES, uint

PACKED = sorted(name for name, dtype in DTYPES.items() if dtype.width <= 4)


def mixed(seed: int, n: int) -> np.ndarray[Any, Any]:
    """n words of 64 bits that look random."""
    with np.errstate(over="ignore"):
        z = (np.arange(n, dtype=np.uint64) + np.uint64(seed * 1_000_003 + 1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def pair(dtype: str, shape: tuple[int, ...], seed: int, permille: int, kind: str) -> tuple[Any, Any]:
    """Old and new elements, flat. ``kind``: "weights" (few exponents, small steps), "any" bits, or "same" exponent."""
    n, d = prod(shape), DTYPES[dtype]
    start, count = d.exponent
    ones, word = (1 << count) - 1, uint(d.width)
    old = mixed(3 * seed, n).astype(word)
    if count and kind != "any":
        # One in two has the first exponent, one in four the one below, ...
        depth = np.zeros(n, np.int64)
        coin = mixed(3 * seed + 1, n)
        for i in range(14 if kind == "weights" else 0):
            depth += ((coin >> np.uint64(i)) & np.uint64(1)).astype(np.int64) * (depth == i)
        exponent = np.maximum(ones // 2 - 3 - depth, 0)
        old = (old & ~word.type(ones << start)) | (exponent.astype(word) << word.type(start))
    chance = mixed(3 * seed + 2, n)
    hit = chance % np.uint64(1000) < np.uint64(permille)
    if count and kind == "weights":
        hit &= (chance >> np.uint64(32)) % np.uint64(16) <= (depth + 2).astype(np.uint64)
    new = old.copy()
    if kind == "any":
        new[hit] = mixed(3 * seed + 3, n)[hit].astype(word)
    else:
        step = (mixed(3 * seed + 4, n) % np.uint64(5)).astype(word) // word.type(2) + word.type(1)
        new[hit] += step[hit]
    return old, new


def of_classes(name, shape, classes, share, seed=1, steep=True):
    """Words of ``classes`` exponents, as many of each, and some above and below; the smaller, the more change.

    ``steep``: three times as many from one exponent to the next, ``share`` in the third; else from ``share`` to 3 x it.
    """
    rng, dtype = np.random.default_rng(seed), DTYPES[name]
    (start, count), word = dtype.exponent, uint(dtype.width)
    depth = rng.integers(0, classes, int(np.prod(shape)))
    middle = min((1 << count) - 4, (1 << count) // 2 + classes // 2)
    exponent = np.clip(middle - depth + rng.choice([0, 0, 0, 0, 0, 0, 0, 3, -3], len(depth)), 0, (1 << count) - 2)
    old = rng.integers(0, 1 << min(32, 8 * dtype.width), len(depth), np.uint64).astype(word)
    old = old & ~word.type(((1 << count) - 1) << start) | exponent.astype(word) << word.type(start)
    rate = np.minimum(share * 3.0 ** (depth - 2), 0.95) if steep else share * (1 + 2 * depth / classes)
    hit = rng.random(len(depth)) < rate
    step = np.where(rng.random(len(depth)) < 0.8, 1, rng.integers(1, 6, len(depth))).astype(word)
    return name, old, np.where(hit, old + step, old).astype(word), shape


def job_of(dtype: str, shape: tuple[int, ...], old: Any, new: Any) -> EncodeJob:
    at = np.flatnonzero(old != new)
    return EncodeJob(at, old[at], new[at], old, DTYPES[dtype], shape)


def with_right_checksums(job: DecodeJob, payload: bytes, **other: Any) -> DecodeJob:
    """The job with other bytes, and whatever else, behind checksums that are made for them."""
    index: ListIndex = replace(job.index, **other)
    ends = np.cumsum(index.lengths).tolist()
    checksums = [zlib.crc32(payload[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    return replace(job, index=replace(index, checksums=np.array(checksums, np.uint32)), payload=memoryview(payload))
