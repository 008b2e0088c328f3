"""slime's first layout, written so that its receivers read it: changes of floating-point tensors alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zstandard

from deltackpt.checkpoint import Checkpoint
from deltackpt.checkpoint.diff import Difference, differences
from deltackpt.errors import ChainError, UsageError
from deltackpt.interop.changes import changes, elements_of, to_gaps
from deltackpt.interop.files import placed, write_file, write_tensors
from deltackpt.interop.slime_v1 import ENCODINGS, NAMES
from deltackpt.interop.slime_v1_checksum import checksum_of
from deltackpt.interop.vllm import SPARSE, has_nan
from deltackpt.util.file_server import make_folder, remove

LEVEL: Final = 1
FILE_BYTES: Final = 1 << 29  # of positions and values, after which another file is begun, as slime's buffers are
NARROW: Final = 0xFFFF  # the largest gap of two bytes
TORCH: Final = {name: torch for torch, name in NAMES.items()}
HINT: Final = "Its second layout, `slime`, carries every change."


class SlimeV1Writer:
    """``encoding``: deltas (its default), indices or deltas_zstd.

    A receiver marks what stays with NaN, so changes to a NaN, and tensors of other dtypes than BF16, F16, F32 and F64,
    cannot be carried; there are no whole steps either.
    """

    consecutive = True
    anchored = False

    def __init__(self, root: Path, *, encoding: str = "deltas") -> None:
        if encoding not in ENCODINGS:
            raise UsageError("usage", where="slime-v1", have=f"encoding {encoding!r}", need=", ".join(ENCODINGS))
        self._root, self._encoding = root, encoding

    def whole(self, number: int, new: Checkpoint) -> None:
        """Never called: the engine has loaded a directory."""
        raise AssertionError("the engine has loaded a directory")

    def delta(self, number: int, old: Checkpoint, new: Checkpoint, threads: int) -> str | None:
        """A directory of one file for each dtype, or several where there is much. Raises ChainError ``foreign-carry``
        for a change that the layout cannot carry."""
        if (reason := next(changes(old, new), None)) is not None:
            raise _no_carry(number, reason)
        with placed(self._root / f"weight_v{number:06d}") as draft:
            make_folder(draft)
            for flush, bucket in enumerate(self._buckets(number, differences(old, new, threads), new)):
                self._put(draft / f"rank0000_flush{flush:06d}.safetensors", number, bucket)
        return None

    def _buckets(self, number: int, found: Iterator[Difference], new: Checkpoint) -> Iterator[_Bucket]:
        """Changes by dtype: a file's values have one, and none is ever promoted to another's."""
        filling: dict[str, _Bucket] = {}
        for difference in found:
            change = difference.change
            if difference.empty or change is None or change.base is None:
                continue
            dtype, tensor = change.dtype.name, new.tensors[difference.name]
            if dtype not in SPARSE or has_nan(change.new, dtype):
                have = f"a change of {difference.name[:80]!r}, {dtype}" + (" to a NaN" if dtype in SPARSE else "")
                raise _no_carry(number, have)
            if self._encoding == "indices" and elements_of(tensor) > 1 << 31:
                raise _no_carry(number, f"{difference.name[:80]!r}, too large for positions of 32 bits")
            bucket = filling.setdefault(dtype, _Bucket(dtype))
            bucket.add(difference.name, tensor.shape, self._positions(change.positions), change.new)
            if bucket.size >= FILE_BYTES:
                yield filling.pop(dtype)
        yield from filling.values()

    def _positions(self, positions: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if self._encoding == "indices":
            return positions.astype("<i4")
        gaps = to_gaps(positions.astype(np.int64))
        return gaps.astype("<u2" if int(gaps.max()) <= NARROW else "<u4")

    def _put(self, path: Path, number: int, bucket: _Bucket) -> None:
        positions, values = np.concatenate(bucket.positions), np.concatenate(bucket.values)
        metadata = {
            "encoding": self._encoding,
            "params": json.dumps(bucket.params),
            "current_version": str(number),
            "checksum": str(checksum_of(positions, values.view(np.uint8), bucket.dtype)),
        }
        rows = [
            ("__positions__", "U8", (len(positions),), positions),
            ("__values__", bucket.dtype, (len(values),), values.view(np.uint8)),
        ]
        if self._encoding != "deltas_zstd":
            write_tensors(path, rows, metadata)
            return
        plain = path.with_suffix(".plain")
        write_tensors(plain, rows, metadata)
        write_file(path, [zstandard.ZstdCompressor(level=LEVEL).compress(plain.read_bytes())])
        remove(plain)


@dataclass
class _Bucket:
    """What goes into one file: changes of tensors of one dtype. ``positions`` are uint8 [bytes], ``values`` words."""

    dtype: str
    positions: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    values: list[npt.NDArray[Any]] = field(default_factory=list)
    params: list[dict[str, Any]] = field(default_factory=list)
    at: int = 0  # bytes of positions
    count: int = 0  # values

    @property
    def size(self) -> int:
        return self.at + sum(part.nbytes for part in self.values)

    def add(self, name: str, shape: tuple[int, ...], positions: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
        self.positions.append(positions.view(np.uint8))
        self.values.append(np.ascontiguousarray(values))
        self.params.append(
            {
                "name": name,
                "dtype": TORCH[self.dtype],
                "shape": list(shape),
                "pos_start": self.at,
                "pos_end": self.at + positions.nbytes,
                "pos_width": positions.itemsize,
                "val_start": self.count,
                "val_end": self.count + len(values),
            }
        )
        self.at += positions.nbytes
        self.count += len(values)


def _no_carry(number: int, have: str) -> ChainError:
    need = "changes of BF16, F16, F32 and F64 tensors to numbers"
    return ChainError("foreign-carry", where=f"slime-v1, step {number}", have=have, need=need, hint=HINT)
