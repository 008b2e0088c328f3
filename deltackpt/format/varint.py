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
    """Numbers from 0 to 2^63 - 1, one after the other."""
    out = bytearray()
    for value in values:
        while value > 127:
            out.append(value & 127 | 128)
            value >>= 7
        out.append(value)
    return bytes(out)


def write_array(values: Ints) -> bytes:
    """The same of int64 [n], together."""
    if len(values) < 32:
        return write(values.tolist())
    least, most = (max(1, -(-int(value).bit_length() // 7)) for value in (values.min(), values.max()))
    made = np.empty((len(values), most), np.uint8)
    for i in range(most):
        made[:, i] = values >> (7 * i) & 127 if i else values & 127
    if least == most:  # as of most runs: all take so many bytes
        made[:, :-1] |= 128
        return made.tobytes()
    longer = [values >> (7 * i) > 0 for i in range(1, most)]
    for i, more in enumerate(longer):
        made[:, i] |= more.view(np.uint8) << 7
    there = np.stack([np.ones(len(values), bool), *longer], 1)
    return bytes(made[there])


class VarintReader:
    """A cursor over bytes; every read is checked against the end, the limits and the shortest form."""

    def __init__(self, data: bytes | memoryview, where: str) -> None:
        self._data = memoryview(data)
        self._where = where
        self.at = 0

    @property
    def left(self) -> int:
        """Bytes that were not read yet."""
        return len(self._data) - self.at

    def refuse(self, code: str, have: str, need: str) -> NoReturn:
        """Raise FormatError ``code`` for what was read last."""
        raise FormatError(code, where=f"{self._where}, byte {self.at}", have=have, need=need)

    def raw(self, length: int) -> memoryview:
        """The next ``length`` bytes. Raises FormatError ``table-short``."""
        if length > self.left:  # [F-READ-2]
            self.refuse("table-short", f"{self.left} bytes left", f"{length} bytes")
        self.at += length
        return self._data[self.at - length : self.at]

    def byte(self) -> int:
        """The next byte. Raises FormatError ``table-short``."""
        at = self.at
        if at >= len(self._data):  # [F-READ-2]
            self.refuse("table-short", "0 bytes left", "1 bytes")
        self.at = at + 1
        return self._data[at]

    def number(self, limit: int = (1 << 63) - 1) -> int:
        """The next number, at most ``limit``. Raises FormatError ``table-short``, ``number-form``, ``number-limit``."""
        value = shift = 0
        for _ in range(MAX_BYTES):
            byte = self.byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                if byte == 0 and shift > 7:  # [F-NUM-1]
                    break
                if value > limit:  # [F-NUM-3]
                    self.refuse("number-limit", f"{value:,}", f"at most {limit:,}")
                return value
        # [F-NUM-1], [F-NUM-2]
        self.refuse("number-form", "a number that is not in its shortest form", "LEB128 of at most 63 bits")

    def numbers(self, count: int, limit: int = (1 << 63) - 1) -> Ints:
        """A run of ``count`` numbers, decoded together: int64, shape (count,), each at most ``limit``.

        A count that the bytes left cannot hold is refused first. Raises what `number` raises.
        """
        if count > self.left:  # [F-READ-2]
            self.refuse("table-short", f"{self.left} bytes left", f"{count:,} numbers")
        if count < 32:
            return np.array([self.number(limit) for _ in range(count)], np.int64)
        data = np.frombuffer(self._data[self.at : self.at + count * MAX_BYTES], np.uint8)
        ends = np.flatnonzero(data < 128)[:count]
        if len(ends) < count:
            self.refuse("number-form", "a run of numbers without an end", "LEB128 of at most 63 bits")
        lengths = np.diff(ends, prepend=-1)
        # [F-NUM-1], [F-NUM-2]
        if (lengths > MAX_BYTES).any() or ((data[ends] == 0) & (lengths > 1)).any():
            self.refuse("number-form", "a number that is not in its shortest form", "LEB128 of at most 63 bits")
        values = np.zeros(count, np.int64)
        for i in range(int(lengths.max())):
            longer = np.flatnonzero(lengths > i)
            values[longer] |= (data[ends[longer] - lengths[longer] + 1 + i].astype(np.int64) & 127) << (7 * i)
        if (values > limit).any():  # [F-NUM-3]
            self.refuse("number-limit", f"{int(values.max()):,}", f"at most {limit:,}")
        self.at += int(ends[-1]) + 1
        return values


def arrays(*values: Sequence[int] | Ints) -> bytes:
    """Runs of numbers, one after the other."""
    return b"".join(write(v.tolist() if isinstance(v, np.ndarray) else v) for v in values)
