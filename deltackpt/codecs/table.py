"""The part table: one entry per tensor or box, before any of its bytes are touched (FORMAT section "Part table").

Whoever holds an entry may trust it: names, shapes, counts, lengths and offsets are checked against each other and
against the limits, and nothing was allocated that the table's own bytes do not pay for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deltackpt.codecs import planes
from deltackpt.codecs.packed import codec as packed
from deltackpt.codecs.packed.exponent_lists import Near
from deltackpt.codecs.packed.steps import MAX_EXCEPTION_K, Scale
from deltackpt.codecs.packed.tile_index import TileIndex
from deltackpt.codecs.plain import Checked
from deltackpt.codecs.tiles import MAX_TILE, Grid, collapse
from deltackpt.format.dtypes import BY_CODE, DTYPES, DType, nbytes, storage_shape
from deltackpt.format.safetensors_header import MAX_NAME, MAX_RANK, check_name
from deltackpt.format.varint import VarintReader, arrays, write

MAX_ENTRIES = 1 << 20
MAX_CLASSES = 15
BOXED = 0x80
ENCODINGS = ("removed", "full", "nan", "index", "packed", "planes")


@dataclass(frozen=True)
class Entry:
    """What a part holds of one tensor: all of it, or the box of ``shape`` at ``offset`` in the global ``whole``."""

    name: str
    encoding: str
    dtype: DType
    shape: tuple[int, ...] = ()  # of the box, in elements as a checkpoint's header counts them
    whole: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()
    detail: Any = None

    @property
    def boxed(self) -> bool:
        return self.shape != self.whole

    @property
    def changes(self) -> int:
        """Changed storage elements."""
        if self.encoding == "packed":
            return int(self.detail.counts.sum())
        return 0 if self.detail is None else int(self.detail.changes)

    @property
    def elements(self) -> int:
        """Storage elements of the box."""
        return nbytes(self.dtype, self.shape) // self.dtype.width

    @property
    def payload(self) -> int:
        """Bytes in the part's payload tensor."""
        if self.encoding == "packed":
            return int(self.detail.lengths.sum())
        if self.encoding == "full" and self.boxed:
            return nbytes(self.dtype, self.shape)
        return int(self.detail.length) if self.encoding == "planes" else 0


REMOVED = DTYPES["U8"]


def write_table(entries: Sequence[Entry]) -> bytes:
    """Entries, sorted by (name, offset), as the bytes of the table tensor."""
    out, last = [write([len(entries)])], b""
    for e in entries:
        name = e.name.encode()
        shared = next(
            (i for i, (a, b) in enumerate(zip(name, last, strict=False)) if a != b), min(len(name), len(last))
        )
        out.append(write([shared, len(name) - shared]) + name[shared:])
        out.append(bytes([ENCODINGS.index(e.encoding) | BOXED * e.boxed]))
        if e.encoding != "removed":
            out.append(bytes([e.dtype.code, len(e.shape)]) + write(e.shape))
            if e.boxed:
                out.append(write(e.whole) + write(e.offset))
            out.append(_WRITERS[e.encoding](e.detail))
        last = name
    return b"".join(out)


def read_table(data: bytes | memoryview, where: str) -> list[Entry]:
    """Inverse of :func:`write_table`. Raises FormatError."""
    r = VarintReader(data, where)
    entries: list[Entry] = []
    last = b""
    order: tuple[bytes, tuple[int, ...]] = (b"", (-1,))
    for _ in range(r.number(MAX_ENTRIES)):
        name = last[: r.number(len(last))]
        name += bytes(r.raw(r.number(MAX_NAME)))
        entry = _read_entry(r, name, where)
        key = (name, entry.offset)
        if key <= order or (entries and name == last and not (entry.boxed and entries[-1].boxed)):
            r.refuse("table-order", f"{entry.name[:80]!r} out of order or twice", "entries sorted by name and offset")
        entries.append(entry)
        last, order = name, key
    if r.left:
        r.refuse("table-long", f"{r.left} bytes after the last entry", "none")
    return entries


def _read_entry(r: VarintReader, raw: bytes, where: str) -> Entry:
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        r.refuse("name-refused", "a name that is not UTF-8", "text")
    check_name(name, where)
    code = r.byte()
    if code & ~BOXED >= len(ENCODINGS):
        r.refuse(
            "encoding-unknown", f"encoding {code & ~BOXED}", f"one of {len(ENCODINGS)}: a newer deltackpt may know it"
        )
    encoding = ENCODINGS[code & ~BOXED]
    if encoding == "removed":
        if code & BOXED:
            r.refuse("box-outside", "a removed box", "a whole tensor")
        return Entry(name, encoding, REMOVED)
    dtype = BY_CODE.get(r.byte())
    if dtype is None:
        r.refuse("dtype-unknown", "an unknown dtype code", "one of the registry")
    rank = r.byte()
    if rank > MAX_RANK:
        r.refuse("shape-overflow", f"{rank} dimensions", f"at most {MAX_RANK}")
    at = f"{where}, {name[:80]!r}"
    shape = whole = tuple(r.numbers(rank).tolist())
    offset = (0,) * rank
    if code & BOXED:
        whole, offset = tuple(r.numbers(rank).tolist()), tuple(r.numbers(rank).tolist())
        if shape == whole or any(o + s > w for o, s, w in zip(offset, shape, whole, strict=True)):
            r.refuse("box-outside", f"box {shape} at {offset} of {whole}", "a proper part of the tensor")
        if dtype.bits != 8 * dtype.width:
            r.refuse("box-outside", f"a box of {dtype.name}", "whole tensors of packed dtypes")
        if encoding in ("nan", "index"):
            r.refuse("encoding-boxed", f"a box in encoding {encoding}", "full, packed or planes")
    if encoding == "nan" and dtype.nan is None:
        r.refuse("encoding-dtype", f"nan {dtype.name}", "a dtype with a NaN of its own")
    nbytes(dtype, whole, where=at)
    elements = nbytes(dtype, shape, where=at) // dtype.width
    detail = _READERS[encoding](r, dtype, storage_shape(dtype, shape), elements)
    return Entry(name, encoding, dtype, shape, whole, offset, detail)


def detail_size(encoding: str, detail: Any) -> int:
    """Bytes that an entry's detail takes in the table."""
    return len(_WRITERS[encoding](detail))


def _write_checked(detail: Checked) -> bytes:
    return write([detail.changes]) + detail.checksum.to_bytes(4, "little")


def _read_checked(r: VarintReader, dtype: DType, shape: tuple[int, ...], elements: int) -> Checked:
    return Checked(r.number(elements), int.from_bytes(r.raw(4), "little"))


def _write_packed(d: TileIndex) -> bytes:
    head = [d.grid.lead, d.grid.rows, d.grid.columns, d.near.classes]
    head += [d.near.threshold] if d.near.classes else []
    head += [d.scale.ceiling]
    head += [d.scale.anchor, d.exception_k] if d.scale.ceiling else []
    return write(head) + arrays(d.counts.ravel(), d.unary, d.lengths) + d.checksums.astype("<u4").tobytes()


def _read_packed(r: VarintReader, dtype: DType, shape: tuple[int, ...], elements: int) -> TileIndex:
    if dtype.width not in packed.WIDTHS:
        r.refuse("encoding-dtype", f"packed {dtype.name}", "a dtype of 1, 2 or 4 bytes")
    lead, height, width = collapse(shape)
    slices, rows, columns = r.number(), r.number(), r.number()
    if slices not in (1, lead) or not slices:
        r.refuse("grid", f"{slices} slices", f"{lead} leading slices, or 1")
    if slices != lead:
        lead, height = 1, lead * height
    if not 0 < rows <= max(1, height) or not 0 < columns <= max(1, width):
        r.refuse("grid", f"{rows} x {columns} tiles", f"1 x 1 to {height} x {width}")
    grid = Grid(lead, height, width, rows, columns)
    classes = r.number(MAX_CLASSES)
    exponents = 1 << dtype.exponent[1]
    near = Near(r.number(exponents - 1) if classes else 0, classes)
    ceiling = r.number(exponents)
    scale = Scale(ceiling, r.number(255) if ceiling else 0)
    exception_k = r.number(MAX_EXCEPTION_K) if ceiling else 0
    if grid.span > MAX_TILE or grid.tiles * (near.lists + 6) > r.left:
        r.refuse(
            "grid", f"{grid.rows} x {grid.columns} tiles", f"tiles below {MAX_TILE:,} elements, each in the directory"
        )
    counts = r.numbers(grid.tiles * near.lists, grid.span).reshape(grid.tiles, near.lists)
    unary = r.numbers(grid.tiles, 1 << 40)
    lengths = r.numbers(grid.tiles, 1 << 40)
    checksums = np.frombuffer(r.raw(4 * grid.tiles), "<u4")
    _, height_of, width_of = grid.origin(np.arange(grid.tiles))
    if (counts.sum(axis=1) > height_of * width_of).any():
        r.refuse("count-outside", "more changes than elements in a tile", "at most all")
    # At least a sign per change, and no more bits per change than the widest code can take.
    changes = counts.sum(axis=1)
    if ((changes + 7) // 8 + unary > lengths).any():
        r.refuse("tile-short", "a tile shorter than its sections", "room for signs and unary codes")
    return TileIndex(grid, near, scale, exception_k, counts, unary, lengths, checksums)


def _write_planes(d: planes.ChunkIndex) -> bytes:
    return write([d.changes]) + arrays(d.sizes.ravel()) + d.checksums.astype("<u4").tobytes()


def _read_planes(r: VarintReader, dtype: DType, shape: tuple[int, ...], elements: int) -> planes.ChunkIndex:
    changes = r.number(elements)
    chunks = planes.chunks(elements)
    if chunks * (dtype.width + 4) > r.left:
        r.refuse("table-short", f"{r.left} bytes left", f"{chunks:,} chunks")
    sizes = r.numbers(chunks * dtype.width, 4 * planes.CHUNK).reshape(chunks, dtype.width)
    return planes.ChunkIndex(changes, sizes, np.frombuffer(r.raw(4 * chunks), "<u4"))


_WRITERS: dict[str, Callable[[Any], bytes]] = {
    "full": _write_checked,
    "nan": _write_checked,
    "index": _write_checked,
    "packed": _write_packed,
    "planes": _write_planes,
}
_READERS: dict[str, Callable[[VarintReader, DType, tuple[int, ...], int], Any]] = {
    "full": _read_checked,
    "nan": _read_checked,
    "index": _read_checked,
    "packed": _read_packed,
    "planes": _read_planes,
}
