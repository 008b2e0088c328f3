"""The entropy floor of a patch: the bits that its positions and ULP steps hold if every tensor is coded by itself.

Positions: log2 C(elements, changes), the entropy of a uniform choice of positions once the count is known.
Steps: the empirical entropy of new - old in the ordered integer map, of each tensor's own steps, and of all pooled.
No side information (old exponents, earlier patches) is counted, so a codec that uses some can go below.
Empirical entropy is biased low where a tensor has few changes, so the sum per tensor is the harder one to reach.

Beside it the floor in the light of the old exponent, which no coder goes below that knows of a tensor's old elements
their exponents alone: of the n elements with old exponent e, m changed, log2 C(n, m) bits say which, and the entropy of
the steps given e says how far. Tensors below SMALL elements are reported apart: there n, m and the distribution of the
steps, which are free here, cost a coder most.

Shares no code with the library, whose sizes it judges.

    python bench/floor.py OLD_DIR NEW_DIR [--json]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

CHUNK = 1 << 20  # elements
SMALL = 1 << 16  # elements
EXPONENT = {  # first bit and bits of the exponent field
    "BF16": (7, 8),
    "F16": (10, 5),
    "F32": (23, 8),
    "F64": (52, 11),
    "F8_E4M3": (3, 4),
    "F8_E5M2": (2, 5),
}
SIGN_MAGNITUDE = {"BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2"}

Words = npt.NDArray[Any]


@dataclass(frozen=True)
class Floor:
    """Totals in bits over all tensors that both states have in one dtype and size; ``changes`` counts elements."""

    elements: int
    changes: int
    position_bits: float
    step_bits: float  # per tensor
    pooled_step_bits: float

    @property
    def bits(self) -> float:
        """H(position) + H(ULP step), both per tensor: what the size figures are measured against."""
        return self.position_bits + self.step_bits

    @property
    def pooled_bits(self) -> float:
        return self.position_bits + self.pooled_step_bits

    @property
    def density(self) -> float:
        return self.changes / self.elements if self.elements else 0.0

    def per_change(self, bits: float) -> float:
        return bits / self.changes if self.changes else 0.0

    def to_dict(self) -> dict[str, float]:
        totals = {**vars(self), "bits": self.bits, "pooled_bits": self.pooled_bits, "density": self.density}
        return totals | {f"{k}_per_change": self.per_change(v) for k, v in totals.items() if k.endswith("bits")}


def tensors(directory: Path) -> dict[str, tuple[str, Words]]:
    """Every tensor of a checkpoint directory: its dtype, and its elements as memory-mapped unsigned words."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        raw = np.memmap(path, np.uint8, "r")
        size = int.from_bytes(raw[:8].tobytes(), "little")
        for name, entry in json.loads(raw[8 : 8 + size].tobytes()).items():
            if name != "__metadata__":
                start, end = (8 + size + offset for offset in entry["data_offsets"])
                width = max(1, (end - start) // max(1, math.prod(entry["shape"])))
                found[name] = (entry["dtype"], raw[start:end].view(f"<u{width}"))
    return found


def changes_of(old: Words, new: Words, dtype: str) -> npt.NDArray[np.int64]:
    """The ULP steps of the elements that differ, in order of position."""
    steps = []
    for at in range(0, len(old), CHUNK):
        a, b = old[at : at + CHUNK], new[at : at + CHUNK]
        where = np.flatnonzero(a != b)
        steps.append(_ordered(b[where], dtype) - _ordered(a[where], dtype))
    return np.concatenate(steps) if steps else np.zeros(0, np.int64)


def _ordered(words: Words, dtype: str) -> npt.NDArray[np.int64]:
    """Bit patterns as integers in the order of the floats; a difference of 1 is one ULP. Others are as they are."""
    signed = words.view(f"<i{words.itemsize}").astype(np.int64)
    last = words.itemsize * 8 - 1
    return signed ^ ((signed >> 63) & ((1 << last) - 1)) if dtype in SIGN_MAGNITUDE else signed


def position_bits(elements: int, changes: int) -> float:
    """log2 of the number of ways to choose so many positions."""
    ways = math.lgamma(elements + 1) - math.lgamma(changes + 1) - math.lgamma(elements - changes + 1)
    return ways / math.log(2)


def entropy_bits(counts: npt.NDArray[np.int64]) -> float:
    """Empirical entropy of a sample, for the whole of it."""
    total = int(counts.sum())
    return float(np.sum(counts * -np.log2(counts / total))) if total else 0.0


def floor(old: Path, new: Path) -> Floor:
    """The floor of the patch from one checkpoint directory to another."""
    elements = changes = 0
    positions = steps = 0.0
    pooled: dict[int, int] = {}
    for dtype, a, b in _pairs(tensors(old), tensors(new)):
        values, counts = np.unique(changes_of(a, b, dtype), return_counts=True)
        changed = int(counts.sum())
        elements, changes = elements + len(a), changes + changed
        positions += position_bits(len(a), changed)
        steps += entropy_bits(counts)
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            pooled[value] = pooled.get(value, 0) + count
    return Floor(elements, changes, positions, steps, entropy_bits(np.array(list(pooled.values()), np.int64)))


def _pairs(old: dict[str, tuple[str, Words]], new: dict[str, tuple[str, Words]]) -> Iterator[tuple[str, Words, Words]]:
    for name, (dtype, words) in old.items():
        if name in new and new[name][0] == dtype and len(new[name][1]) == len(words):
            yield dtype, words, new[name][1]


@dataclass(frozen=True)
class ExponentFloor:
    """Totals in bits, given the old exponent of every element, over some tensors."""

    elements: int = 0
    changes: int = 0
    position_bits: float = 0.0
    step_bits: float = 0.0

    def __add__(self, other: ExponentFloor) -> ExponentFloor:
        return ExponentFloor(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def bits(self) -> float:
        return self.position_bits + self.step_bits

    @property
    def density(self) -> float:
        return self.changes / self.elements if self.elements else 0.0

    def to_dict(self) -> dict[str, float]:
        per_change = self.bits / self.changes if self.changes else 0.0
        return {**vars(self), "bits": self.bits, "bits_per_change": per_change, "density": self.density}


def floor_given_exponent(old: Words, new: Words, dtype: str) -> ExponentFloor:
    """Of one tensor, given as two flat arrays of unsigned words."""
    start, count = EXPONENT.get(dtype, (0, 0))
    elements = np.zeros(1 << count, np.int64)
    kinds: list[npt.NDArray[np.int64]] = [np.zeros((0, 2), np.int64)]
    for at in range(0, len(old), CHUNK):
        a, b = old[at : at + CHUNK], new[at : at + CHUNK]
        elements += np.bincount(_exponent(a, start, count), minlength=1 << count)
        where = np.flatnonzero(a != b)
        steps = _ordered(b[where], dtype) - _ordered(a[where], dtype)
        kinds.append(np.stack([_exponent(a[where], start, count), steps], axis=1))
    pairs = np.concatenate(kinds)
    changed = np.bincount(pairs[:, 0], minlength=1 << count)
    _, counts = np.unique(pairs, axis=0, return_counts=True)
    positions = sum(position_bits(int(n), int(m)) for n, m in zip(elements, changed, strict=True))
    step_bits = entropy_bits(counts) - entropy_bits(changed[changed > 0])
    return ExponentFloor(len(old), len(pairs), positions, step_bits)


def _exponent(words: Words, start: int, count: int) -> npt.NDArray[np.int64]:
    field = (words >> words.dtype.type(start)) & words.dtype.type((1 << count) - 1)
    wide: npt.NDArray[np.int64] = field.astype(np.int64)
    return wide


def floors_given_exponent(old: Path, new: Path) -> tuple[ExponentFloor, ExponentFloor]:
    """From one checkpoint directory to another -> (tensors of SMALL elements and more, those below)."""
    large, small = ExponentFloor(), ExponentFloor()
    for dtype, a, b in _pairs(tensors(old), tensors(new)):
        found = floor_given_exponent(a, b, dtype)
        large, small = (large + found, small) if len(a) >= SMALL else (large, small + found)
    return large, small


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = floor(args.old, args.new)
    large, small = floors_given_exponent(args.old, args.new)
    if args.json:
        given = {"large": large.to_dict(), "small": small.to_dict(), "all": (large + small).to_dict()}
        print(json.dumps({**found.to_dict(), "given_exponent": given}))
        return
    print(f"{found.changes:,} of {found.elements:,} elements changed ({found.density:.3%})")
    for title, bits in {
        "H(position), per tensor": found.position_bits,
        "H(ULP step), per tensor": found.step_bits,
        "H(ULP step), pooled": found.pooled_step_bits,
        "floor, per tensor": found.bits,
        "floor, steps pooled": found.pooled_bits,
    }.items():
        print(f"{title:24} {found.per_change(bits):7.3f} bits per change {bits / 8:14,.0f} bytes")
    for title, row in {"large": large, "small": small, "all": large + small}.items():
        per_change = row.bits / row.changes if row.changes else 0.0
        name = f"given exponent, {title}"
        print(f"{name:24} {per_change:7.3f} bits per change {row.bits / 8:14,.0f} bytes, density {row.density:.4%}")


if __name__ == "__main__":
    main()
