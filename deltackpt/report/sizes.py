"""How one tensor differs between two checkpoints, and what each encoding would make of it."""

from __future__ import annotations

from dataclasses import dataclass

from deltackpt.checkpoint import Checkpoint
from deltackpt.checkpoint.diff import Difference
from deltackpt.codecs import CHOICES, Change, Encoded, Entry
from deltackpt.codecs.table import write_table
from deltackpt.patch.encode import encode_entry
from deltackpt.report.ulp import share_by_one

ENCODINGS = CHOICES[1:]  # `auto` is the choice among them


@dataclass(frozen=True)
class TensorDifference:
    """``what`` is same, changed, replaced (another dtype or shape), added or removed. ``encoding`` and ``bytes`` are
    what `auto` makes of it, row in the table included; ``sizes`` what each encoding would, None where it cannot."""

    name: str
    what: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    changed: int
    density: float
    one_ulp: float | None
    encoding: str | None  # None where the patch holds nothing of it
    bytes: int
    sizes: dict[str, int | None]


def describe(found: Difference, old: Checkpoint, new: Checkpoint) -> TensorDifference:
    """One tensor of two checkpoints, which were compared."""
    change = found.change
    if change is None:
        gone = old.tensors[found.name]
        entry, none = Entry.removal(found.name), dict.fromkeys(ENCODINGS)
        return TensorDifference(
            found.name, "removed", gone.dtype, gone.shape, 0, 0, 0.0, None, entry.encoding, _size(entry, None), none
        )
    shape = new.tensors[found.name].shape
    if found.empty:
        sizes: dict[str, int | None] = dict.fromkeys(ENCODINGS, 0)
        return TensorDifference(
            found.name, "same", change.dtype.name, shape, change.elements, 0, 0.0, None, None, 0, sizes
        )
    whole = change.base is None
    changed = change.elements if whole else len(change.positions)
    encoding, sizes = _sizes(found.name, change, shape)
    return TensorDifference(
        name=found.name,
        what="changed" if not whole else "replaced" if found.old_xxh3 else "added",
        dtype=change.dtype.name,
        shape=shape,
        elements=change.elements,
        changed=changed,
        density=changed / max(1, change.elements),
        one_ulp=share_by_one(change.old, change.new, change.dtype),
        encoding=encoding,
        bytes=sizes[encoding] or 0,
        sizes=sizes,
    )


def _sizes(name: str, change: Change, shape: tuple[int, ...]) -> tuple[str, dict[str, int | None]]:
    """-> what `auto` chooses, and the size of every encoding that can carry the change exactly."""
    sizes: dict[str, int | None] = dict.fromkeys(ENCODINGS)

    def measure(wanted: str) -> str:
        entry, encoded = encode_entry(name, change, shape, set(), wanted)
        sizes[entry.encoding] = _size(entry, encoded)
        return entry.encoding

    chosen = measure("auto")
    for encoding in () if change.base is None else ENCODINGS:  # what is new has one encoding
        if sizes[encoding] is None:
            measure(encoding)
    return chosen, sizes


def _size(entry: Entry, encoded: Encoded | None) -> int:
    return len(write_table([entry])) - len(write_table([])) + (encoded.size if encoded else 0)
