"""Little-endian base-128 numbers (LEB128), read and written in runs (FORMAT section "Numbers").

Seven bits a byte, least significant first; the high bit says that more follow. The shortest form is the only one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from deltackpt.errors import FormatError

MAX_BYTES = 9  # 63 bits

Ints = npt.NDArray[np.int64]


def write(values: Iterable[int]) -> bytes:
    out = bytearray()
    for value in values:
        while value > 127:
            out.append(value & 127 | 128)
            value >>= 7
        out.append(value)
    return bytes(out)


class VarintReader:
    """A cursor over bytes; every read is checked against the end, the limits and the shortest form."""

    def __init__(self, data: bytes | memoryview, where: str) -> None:
        self._data = memoryview(data)
        self._where = where
        self.at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self.at

    def refuse(self, code: str, have: str, need: str) -> NoReturn:
        raise FormatError(code, where=f"{self._where}, byte {self.at}", have=have, need=need)

    def raw(self, length: int) -> memoryview:
        if length > self.left:
            self.refuse("table-short", f"{self.left} bytes left", f"{length} bytes")
        self.at += length
        return self._data[self.at - length : self.at]

    def byte(self) -> int:
        return self.raw(1)[0]

    def number(self, limit: int = (1 << 63) - 1) -> int:
        value = shift = 0
        for _ in range(MAX_BYTES):
            byte = self.byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                if byte == 0 and shift > 7:
                    break
                if value > limit:
                    self.refuse("number-limit", f"{value:,}", f"at most {limit:,}")
                return value
        self.refuse("number-form", "a number that is not in its shortest form", "LEB128 of at most 63 bits")

    def numbers(self, count: int, limit: int = (1 << 63) - 1) -> Ints:
        """A run of ``count`` numbers, decoded together; refuses a count that the bytes left cannot hold first."""
        if count > self.left:
            self.refuse("table-short", f"{self.left} bytes left", f"{count:,} numbers")
        if count < 32:
            return np.array([self.number(limit) for _ in range(count)], np.int64)
        data = np.frombuffer(self._data[self.at : self.at + count * MAX_BYTES], np.uint8)
        ends = np.flatnonzero(data < 128)[:count]
        if len(ends) < count:
            self.refuse("number-form", "a run of numbers without an end", "LEB128 of at most 63 bits")
        lengths = np.diff(ends, prepend=-1)
        if (lengths > MAX_BYTES).any() or ((data[ends] == 0) & (lengths > 1)).any():
            self.refuse("number-form", "a number that is not in its shortest form", "LEB128 of at most 63 bits")
        values = np.zeros(count, np.int64)
        for i in range(int(lengths.max())):
            longer = np.flatnonzero(lengths > i)
            values[longer] |= (data[ends[longer] - lengths[longer] + 1 + i].astype(np.int64) & 127) << (7 * i)
        if (values > limit).any():
            self.refuse("number-limit", f"{int(values.max()):,}", f"at most {limit:,}")
        self.at += int(ends[-1]) + 1
        return values


def arrays(*values: Sequence[int] | Ints) -> bytes:
    return b"".join(write(v.tolist() if isinstance(v, np.ndarray) else v) for v in values)
