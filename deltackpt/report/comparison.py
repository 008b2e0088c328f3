"""What a patch between two checkpoint directories would hold, by tensor and by layer, in every encoding."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from deltackpt.checkpoint import Checkpoint
from deltackpt.checkpoint.diff import difference
from deltackpt.format.dtypes import DTYPES
from deltackpt.report.sizes import ENCODINGS, TensorDifference, describe
from deltackpt.report.ulp import mean
from deltackpt.util.parallel import ordered_map, threads_or_default
from deltackpt.util.progress import SILENT, Progress


@dataclass(frozen=True)
class Total:
    """Many tensors together; ``sizes`` has what `write --encoding` would make of them: `auto` where it cannot."""

    name: str
    tensors: int
    elements: int
    changed: int
    density: float
    one_ulp: float | None
    bytes: int
    bits_per_change: float | None
    sizes: dict[str, int]


@dataclass(frozen=True)
class CheckpointComparison:
    """From ``a`` to ``b``. ``side``: the other files that differ; ``left_out``: (path, reason) of what stays behind."""

    a: str
    b: str
    tensors: tuple[TensorDifference, ...]
    layers: tuple[Total, ...]
    total: Total
    side: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def compare(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    threads: int | None = None,
    *,
    progress: Progress = SILENT,
) -> CheckpointComparison:
    """Compare two checkpoint directories bit by bit, and encode every change in every way.

    Memory is that of a few tensors a thread. Raises CheckpointError, FormatError.
    """
    with Checkpoint.open(a) as old, Checkpoint.open(b) as new:

        def one(name: str) -> TensorDifference:
            row = describe(difference(name, old, new), old, new)
            for state in (old, new):
                if name in state.tensors:
                    state.release(name)
            return row

        progress.start("diff", sum(t.end - t.start for t in new.tensors.values()))
        rows = []
        names = sorted({*old.tensors, *new.tensors}, key=str.encode)
        for row in ordered_map(one, names, threads_or_default(threads)):
            rows.append(row)
            progress.advance(row.elements * DTYPES[row.dtype].width if row.what != "removed" else 0)
        side = _side(old, new)
        left_out = new.left_out
    return CheckpointComparison(
        os.fspath(a), os.fspath(b), tuple(rows), _layers(rows), _total("", rows), side, left_out
    )


def layer_of(name: str) -> str:
    """A tensor's name up to its first number (``model.layers.7``); without one, all but the last component."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), max(0, len(parts) - 2))
    return ".".join(parts[: number + 1])


def _layers(rows: Iterable[TensorDifference]) -> tuple[Total, ...]:
    layers: dict[str, list[TensorDifference]] = {}
    for row in rows:
        layers.setdefault(layer_of(row.name), []).append(row)
    return tuple(_total(name, layers[name]) for name in sorted(layers, key=_natural))


def _natural(name: str) -> list[tuple[int, str]]:
    """Numbers by value: layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() and part.isascii() else (-1, part) for part in re.split(r"(\d+)", name)]


def _total(name: str, rows: list[TensorDifference]) -> Total:
    elements, changed = sum(row.elements for row in rows), sum(row.changed for row in rows)
    size = sum(row.bytes for row in rows)
    return Total(
        name=name,
        tensors=sum(row.what != "same" for row in rows),
        elements=elements,
        changed=changed,
        density=changed / max(1, elements),
        one_ulp=mean((row.one_ulp, row.changed) for row in rows),
        bytes=size,
        bits_per_change=8 * size / changed if changed else None,
        sizes={e: sum(row.bytes if row.sizes[e] is None else row.sizes[e] or 0 for row in rows) for e in ENCODINGS},
    )


def _side(old: Checkpoint, new: Checkpoint) -> tuple[str, ...]:
    def differs(path: str) -> bool:
        if path not in old.side or path not in new.side:
            return True
        return (old.root / path).read_bytes() != (new.root / path).read_bytes()

    return tuple(path for path in sorted({*old.side, *new.side}) if differs(path))
