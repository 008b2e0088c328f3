"""The part table: one entry per tensor or box, before any of its bytes are touched (FORMAT section "Part table").

An entry that was read may be trusted: names, shapes, counts, lengths and offsets are checked against each other and
against the limits, and nothing was allocated that the table's own bytes do not pay for.
"""

from __future__ import annotations

from collections.abc import Sequence

from deltackpt.codecs.base import Effect
from deltackpt.codecs.entry import Entry
from deltackpt.codecs.registry import CODECS
from deltackpt.format.dtypes import BY_CODE, DType, nbytes, storage_shape
from deltackpt.format.safetensors_header import MAX_NAME, MAX_RANK, check_name
from deltackpt.format.varint import VarintReader, write

MAX_ENTRIES = 1 << 20
BOXED = 0x80


def write_table(entries: Sequence[Entry]) -> bytes:
    """Entries, sorted by (name, offset), as the bytes of the table tensor."""
    out, last = [write([len(entries)])], b""
    for e in entries:
        name = e.name.encode()
        shared = next(
            (i for i, (a, b) in enumerate(zip(name, last, strict=False)) if a != b), min(len(name), len(last))
        )
        out.append(write([shared, len(name) - shared]) + name[shared:])
        codec = e.codec
        out.append(bytes([codec.code | BOXED * e.boxed]))
        if codec.effect is not Effect.REMOVES:
            out.append(bytes([e.dtype.code, len(e.shape)]) + write(e.shape))
            if e.boxed:
                out.append(write(e.whole) + write(e.offset))
            out.append(codec.write_detail(e.detail))
        last = name
    return b"".join(out)


def read_table(data: bytes | memoryview, where: str) -> list[Entry]:
    """Inverse of :func:`write_table`. Raises FormatError."""
    r = VarintReader(data, where)
    entries: list[Entry] = []
    last = b""
    order: tuple[bytes, tuple[int, ...]] = (b"", (-1,))
    for _ in range(r.number(MAX_ENTRIES)):  # [F-TAB-1]
        name = last[: r.number(len(last))]  # [F-TAB-2]
        name += bytes(r.raw(r.number(MAX_NAME)))
        entry = _read_entry(r, name, where)
        key = (name, entry.offset)
        # [F-TAB-4], [F-TAB-5]
        if key <= order or (entries and name == last and not (entry.boxed and entries[-1].boxed)):
            r.refuse("table-order", f"{entry.name[:80]!r} out of order or twice", "entries sorted by name and offset")
        entries.append(entry)
        last, order = name, key
    if r.left:  # [F-TAB-11]
        r.refuse("table-long", f"{r.left} bytes after the last entry", "none")
    return entries


def _read_entry(r: VarintReader, raw: bytes, where: str) -> Entry:
    try:
        name = raw.decode()
    except UnicodeDecodeError:  # [F-TAB-3]
        r.refuse("name-refused", "a name that is not UTF-8", "text")
    check_name(name, where)  # [F-TAB-3]
    code = r.byte()
    codec, boxed = CODECS.of_code(code & ~BOXED), code & BOXED > 0
    if codec is None:  # [F-VER-6]
        need = f"one of {len(CODECS)}: a newer deltackpt may know it"
        r.refuse("encoding-unknown", f"encoding {code & ~BOXED}", need)
    if codec.effect is Effect.REMOVES:
        if boxed:  # [F-TAB-9]
            r.refuse("box-outside", "a removed box", "a whole tensor")
        return Entry.removal(name)
    dtype = BY_CODE.get(r.byte())
    if dtype is None:  # [F-VER-6]
        r.refuse("dtype-unknown", "an unknown dtype code", "one of the registry")
    shape, whole, offset = _read_box(r, dtype, boxed=boxed)
    if boxed and not codec.boxes:  # [F-TAB-9]
        need = ", ".join(c.name for c in CODECS if c.boxes)
        r.refuse("encoding-boxed", f"a box in encoding {codec.name}", need)
    if not codec.takes_dtype(dtype):  # [F-PLAIN-4], [F-PACK-1]
        r.refuse("encoding-dtype", f"{codec.name} {dtype.name}", codec.dtypes)
    at = f"{where}, {name[:80]!r}"
    nbytes(dtype, whole, where=at)  # [F-TAB-7]
    elements = nbytes(dtype, shape, where=at) // dtype.width
    detail = codec.read_detail(r, dtype, storage_shape(dtype, shape), elements)
    return Entry(name, codec.name, dtype, shape, whole, offset, detail)


def _read_box(r: VarintReader, dtype: DType, *, boxed: bool) -> tuple[tuple[int, ...], ...]:
    """-> (shape, whole, offset)."""
    rank = r.byte()
    if rank > MAX_RANK:  # [F-TAB-7]
        r.refuse("shape-overflow", f"{rank} dimensions", f"at most {MAX_RANK}")
    shape = whole = tuple(r.numbers(rank).tolist())
    offset = (0,) * rank
    if boxed:
        whole, offset = tuple(r.numbers(rank).tolist()), tuple(r.numbers(rank).tolist())
        # [F-TAB-8]
        if shape == whole or any(o + s > w for o, s, w in zip(offset, shape, whole, strict=True)):
            r.refuse("box-outside", f"box {shape} at {offset} of {whole}", "a proper part of the tensor")
        if dtype.bits != 8 * dtype.width:  # [F-TAB-9]
            r.refuse("box-outside", f"a box of {dtype.name}", "whole tensors of packed dtypes")
    return shape, whole, offset
