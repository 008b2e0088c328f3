"""The state digest: the identity of a set of weights, however it is sharded (FORMAT section "State digest").

Per tensor, two lanes of 64 bits: D = sum over i of A[i mod 4096] * B[i div 4096] * v(bits_i), modulo 2^64, where i is
the flat row-major index in the global tensor and A and B are fixed pseudo-random numbers. It is linear in v(bits), so
the shares of ranks add up, and a step updates it by one sum over its changes. This is multilinear hashing (Carter and
Wegman, 1979) with the key of an element a product of two numbers. It detects mistakes and corruption, not an adversary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cache, reduce
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from deltackpt import kernels
from deltackpt.format.dtypes import DType

BLOCK = 1 << 12
LANES = 2
_TOGETHER = 16  # blocks a pass: their terms stay in the cache
DOMAIN = b"deltackpt state 1\n"

Words = npt.NDArray[np.uint64]
Sums = tuple[int, int]
ZERO: Sums = (0, 0)


def mix(n: Words) -> Words:
    """SplitMix64 (Steele, Lea and Flood, 2014): the n-th output of the generator seeded with 0, counted from 0.

    ``n`` and the result are uint64 of one shape.
    """
    z: Words = (n + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


@cache
def _low_keys() -> tuple[Words, Words]:
    """A of both lanes: mix(4 j) and mix(4 j + 1)."""
    j = np.arange(BLOCK, dtype=np.uint64) * np.uint64(4)
    return mix(j), mix(j + np.uint64(1))


def _high_keys(block: Words) -> tuple[Words, Words]:
    """B of both lanes: mix(4 h + 2) and mix(4 h + 3), made odd so that no information is lost."""
    h = block * np.uint64(4)
    return mix(h + np.uint64(2)) | np.uint64(1), mix(h + np.uint64(3)) | np.uint64(1)


def _value(bits: npt.NDArray[Any]) -> Words:
    """v: the bits as a number; 64-bit words fold their upper half down, or a sign flip would move a single bit of D."""
    value = bits.astype(np.uint64)
    return value ^ (value >> np.uint64(32)) if bits.dtype.itemsize == 8 else value


def of_run(bits: npt.NDArray[Any], first: int = 0) -> Sums:
    """D of the elements first, first + 1, ... of a tensor, given as unsigned words [n] of 1, 2, 4 or 8 bytes.

    Shares of one tensor add up.
    """
    if kernels.LIB is not None:
        return kernels.digest_run(bits, first)
    head = min(-first % BLOCK, len(bits))
    body = (len(bits) - head) // BLOCK * BLOCK + head
    total = _of_rows(bits[None, :head], first) if head else ZERO
    if body > head:
        total = add(total, _of_rows(bits[head:body].reshape(-1, BLOCK), first + head))
    return add(total, _of_rows(bits[None, body:], first + body)) if body < len(bits) else total


def _of_rows(rows: npt.NDArray[Any], first: int) -> Sums:
    """D of consecutive blocks, a row each; the only row, or every row, starts at element ``first`` of its tensor."""
    block, offset = divmod(first, BLOCK)
    low = [keys[offset : offset + rows.shape[1]] for keys in _low_keys()]
    inner = np.empty((LANES, len(rows)), np.uint64)
    for at in range(0, len(rows), _TOGETHER):
        value = _value(rows[at : at + _TOGETHER])
        for lane in range(LANES):
            np.einsum("ij,j->i", value, low[lane], out=inner[lane, at : at + _TOGETHER])
    high = _high_keys(np.arange(block, block + len(rows), dtype=np.uint64))
    return int(np.dot(inner[0], high[0])), int(np.dot(inner[1], high[1]))


def of_change(positions: npt.NDArray[np.int64], old: npt.NDArray[Any], new: npt.NDArray[Any]) -> Sums:
    """What is added to D when elements change from ``old`` to ``new``, both unsigned words [n].

    ``positions`` are int64 [n], flat in the global tensor, each once.
    """
    if len(positions) == 0:
        return ZERO
    if kernels.LIB is not None:
        return kernels.digest_change(positions, old, new)
    if (positions[1:] < positions[:-1]).any():
        order = np.argsort(positions)
        positions, old, new = positions[order], old[order], new[order]
    delta = _value(new)
    delta -= _value(old)
    blocks = np.arange(int(positions[0]) // BLOCK, int(positions[-1]) // BLOCK + 1)
    edges = np.searchsorted(positions, blocks * BLOCK)
    held = np.diff(edges, append=len(positions)) > 0
    edges, high = edges[held], _high_keys(blocks[held].astype(np.uint64))
    low = positions & (BLOCK - 1)
    a, b = (int(np.dot(np.add.reduceat(k[low] * delta, edges), high[lane])) for lane, k in enumerate(_low_keys()))
    return a, b


def add(a: Sums, b: Sums) -> Sums:
    """The sums of two disjoint shares of a tensor together, modulo 2^64."""
    return (a[0] + b[0]) % (1 << 64), (a[1] + b[1]) % (1 << 64)


def of_box(bits: npt.NDArray[Any], offset: tuple[int, ...], shape: tuple[int, ...]) -> Sums:
    """D of a box: ``bits``, unsigned words, has the box's shape; ``offset`` is its corner in the global tensor
    ``shape``, both in elements.
    """
    if bits.size == 0:
        return ZERO
    strides, axis = [1] * len(shape), len(shape) - 1
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    while axis > 0 and bits.shape[axis:] == shape[axis:]:  # runs go on over axes that it has whole
        axis -= 1
    firsts = np.array([sum(o * s for o, s in zip(offset, strides, strict=True))], np.int64)
    for n, step in zip(bits.shape[: max(axis, 0)], strides, strict=False):
        firsts = (firsts[:, None] + np.arange(n) * step).ravel()
    rows = bits.reshape(len(firsts), -1)
    if kernels.LIB is not None:
        return kernels.digest_rows(rows, firsts)
    return reduce(add, (of_run(row, first) for row, first in zip(rows, firsts.tolist(), strict=True)), ZERO)


def xxh3(data: npt.NDArray[np.uint8] | memoryview | bytes) -> bytes:
    """The xxh3-128 of a tensor's bytes, uint8 [n]: 16 bytes, most significant first."""
    return xxhash.xxh3_128_digest(memoryview(data))  # type: ignore[arg-type]


class TensorDigest(NamedTuple):
    """What proves one whole tensor: ``sums`` for shards and engines, ``xxh3`` of its bytes at memory speed."""

    sums: Sums
    xxh3: bytes

    def __str__(self) -> str:
        return f"xxh3 {self.xxh3.hex()}, sums {self.sums[0]:016x} {self.sums[1]:016x}"


def of_tensor(data: npt.NDArray[np.uint8], dtype: DType) -> TensorDigest:
    """Both digests of a whole tensor, given as its bytes, uint8 [n]."""
    return TensorDigest(of_run(data.view(f"<u{dtype.width}")), xxh3(data))


def state(tensors: Iterable[tuple[str, str, tuple[int, ...], Sums]]) -> str:
    """The state digest, hex: sha256 over (name, dtype, shape, D) of every tensor in the order of its name's bytes."""
    ordered = sorted(tensors, key=lambda t: t[0].encode())
    forms: dict[tuple[str, tuple[int, ...]], int] = {}  # few tensors have one of their own
    form = np.array([forms.setdefault((t[1], t[2]), len(forms)) for t in ordered], np.int64)
    text = StateText([t[0] for t in ordered], form, list(forms))
    return text.digest(np.array([t[3] for t in ordered], np.uint64).reshape(-1, LANES))


class StateText:
    """What the state digest is the sha256 of, but for the sums; it is the same for all steps of a layout."""

    def __init__(
        self, names: Sequence[str], form: npt.NDArray[np.int64], forms: Sequence[tuple[str, tuple[int, ...]]]
    ) -> None:
        """The names of all tensors, in the order of their bytes; ``form``, int64 [tensors], says which of the
        ``forms``, dtype and shape, each has."""
        raws = [*map(str.encode, names)]
        lengths = [*map(len, raws)]
        # There are few lengths and few forms: each is made once.
        head = {length: length.to_bytes(4, "little") for length in set(lengths)}
        tail = [_form(*key) + bytes(8 * LANES) for key in forms]
        firsts, tails = map(head.__getitem__, lengths), map(tail.__getitem__, form.tolist())
        sizes = np.array([len(text) for text in tail], np.int64)[form]
        ends = len(DOMAIN) + np.cumsum(4 + np.array(lengths, np.int64) + sizes)
        self._text = DOMAIN + b"".join(chain.from_iterable(zip(firsts, raws, tails, strict=True)))
        self._at = ends.reshape(-1, 1) + np.arange(-8 * LANES, 0)

    def digest(self, sums: Words) -> str:
        """The state digest, hex, of tensors with these sums, uint64 [tensors, 2]."""
        text = np.frombuffer(bytearray(self._text), np.uint8)
        text[self._at] = np.ascontiguousarray(sums, "<u8").view(np.uint8).reshape(-1, 8 * LANES)
        return hashlib.sha256(text.data).hexdigest()


def _form(dtype: str, shape: tuple[int, ...]) -> bytes:
    return b"".join(
        [
            len(dtype).to_bytes(1, "little"),
            dtype.encode(),
            len(shape).to_bytes(1, "little"),
            *(d.to_bytes(8, "little") for d in shape),
        ]
    )
