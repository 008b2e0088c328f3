"""TRL's newest form, written: `deltas/` with `.idx` and `.val`, and dense `anchors/`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from deltackpt.checkpoint import Checkpoint
from deltackpt.checkpoint.diff import Difference, differences
from deltackpt.errors import UsageError
from deltackpt.format.safetensors_header import Tensor, build_header
from deltackpt.interop.changes import changes, elements_of, size_of, to_gaps
from deltackpt.interop.files import placed, write_file, write_tensors
from deltackpt.interop.protocol import Bytes
from deltackpt.interop.trl import ANCHORS, DELTAS

DTYPE = "BF16"  # all that its values can be
FORMAT, VERSION = "sparse_weight_patch", "1"


class TrlWriter:
    """``encoding``: gap_delta (its default) or raw."""

    consecutive = True
    anchored = True

    def __init__(self, root: Path, *, encoding: str = "gap_delta") -> None:
        if encoding not in ("gap_delta", "raw"):
            raise UsageError("usage", where="trl", have=f"encoding {encoding!r}", need="gap_delta or raw")
        self._root, self._encoding = root, encoding

    def whole(self, number: int, new: Checkpoint) -> None:
        """One file of all tensors, in order of name."""
        tensors, at = [], 0
        for name, t in new.tensors.items():
            tensors.append(Tensor(name, t.dtype, t.shape, at, at + size_of(t)))
            at += size_of(t)
        metadata = self._metadata(number, new, 0, 0, sparse=False)

        def chunks() -> Iterator[bytes | memoryview]:
            yield build_header(tensors, metadata)
            for tensor in tensors:
                yield new.bytes_of(tensor.name).data
                new.release(tensor.name)

        with placed(self._path(ANCHORS, number)) as draft:
            write_file(draft, chunks())

    def delta(self, number: int, old: Checkpoint, new: Checkpoint, threads: int) -> str | None:
        reason = next(changes(old, new), None)
        rows: list[tuple[str, str, tuple[int, ...], Bytes]] = []
        changed = elements = 0
        for found in differences(old, new, threads) if reason is None else ():
            if found.empty:
                continue
            change = found.change
            assert change is not None
            if change.dtype.name != DTYPE:
                reason = f"{found.name[:80]!r} is {change.dtype.name}, and TRL carries {DTYPE} only"
                break
            if self._encoding == "raw" and change.elements > 1 << 31:
                reason = f"{found.name[:80]!r} is too large for positions of 32 bits"
                break
            changed, elements = changed + 1, elements + len(change.positions)
            rows += self._rows(found)
        if reason is not None:
            self.whole(number, new)
            return reason
        metadata = self._metadata(number, new, changed, elements, sparse=True)
        with placed(self._path(DELTAS, number)) as draft:
            write_tensors(draft, rows, metadata)
        return None

    def _rows(self, found: Difference) -> Iterator[tuple[str, str, tuple[int, ...], Bytes]]:
        change = found.change
        assert change is not None
        count = (len(change.positions),)
        if self._encoding == "raw":
            dtype, positions = "I32", change.positions.astype("<i4")
        else:
            gaps = to_gaps(change.positions)
            wide = int(gaps.max()) > 0xFFFF
            dtype, positions = ("U32", gaps.astype("<u4")) if wide else ("U16", gaps.astype("<u2"))
        yield f"{found.name}.idx", dtype, count, positions.view(np.uint8)
        yield f"{found.name}.val", DTYPE, count, change.new.view(np.uint8)

    def _path(self, folder: str, number: int) -> Path:
        return self._root / folder / f"step_{number:06d}.safetensors"

    def _metadata(self, number: int, new: Checkpoint, changed: int, elements: int, *, sparse: bool) -> dict[str, str]:
        total = sum(elements_of(t) for t in new.tensors.values())
        return {
            "format": FORMAT,
            "version": VERSION,
            "sparse": str(sparse),
            "model_version": str(number),
            "num_changed_params": str(changed),
            "total_changed_elements": str(elements),
            "total_elements": str(total),
            "sparsity": str(1.0 - elements / max(total, 1)),
            "encoding": self._encoding,
        }
