"""The part table: one entry per tensor or box, before any of its bytes are touched (FORMAT section "Part table").

An entry that was read may be trusted: names, shapes, counts, lengths and offsets are checked against each other and
against the limits, and nothing was allocated that the table's own bytes do not pay for. Tables of version 1 share the
start of a name alone, and state every form (VERSION1 section "Table").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt import kernels
from deltackpt.codecs.base import Codec, Effect, Shape
from deltackpt.codecs.entry import Entry
from deltackpt.codecs.entry_block import EntryBlock
from deltackpt.codecs.entry_table import EntryTable, TableRun, read_run
from deltackpt.codecs.registry import CODECS, VERSIONS, Registry
from deltackpt.format.dtypes import BY_CODE, DType, nbytes
from deltackpt.format.safetensors_header import MAX_RANK
from deltackpt.format.tensor_names import MAX_NAME, METADATA, RESERVED, check_name
from deltackpt.format.varint import VarintReader, write

MAX_ENTRIES = 1 << 20
BOXED = 0x80
FEW = 4  # names for which a call of the kernels takes longer than they do
REPEAT = 0x40  # dtype, rank and shape are those of the entry before


def write_table(entries: Sequence[Entry | EntryBlock], version: int = CODECS.version) -> bytes:
    """Entries of parts of ``version``, sorted by (name, offset), as the bytes of the table tensor."""
    names: list[str] = []
    for e in entries:
        names += e.names[e.first : e.end] if isinstance(e, EntryBlock) else [e.name]
    out = [write([len(names)])]
    written, at = _write_names([name.encode() for name in names], tail=version > 1), 0
    form: tuple[str, Shape] | None = None  # of the entry before, if it has one
    for e in entries:
        if isinstance(e, EntryBlock):
            out += chain.from_iterable(_write_block(e, written[at : at + len(e)], form))
            dtype, shape = e.forms[e.form[e.end - 1]]
            at, form = at + len(e), (dtype.name, shape)
        else:
            out += (written[at], *_write_entry(e, form, version))
            at, form = at + 1, None if e.removes else (e.dtype.name, e.shape)
    return b"".join(out)


def table_heads(entries: Sequence[Entry]) -> list[bytes]:
    """What a table of the newest version has of each of some sorted entries, none of which removes, before its detail:
    the first one's begins with their number. Details follow, and nothing else."""
    names = _write_names([entry.name.encode() for entry in entries], tail=True)
    found, form = list[bytes](), None
    for name, entry in zip(names, entries, strict=True):
        found.append(name + b"".join(_write_head(entry, form, CODECS.version)))
        form = entry.dtype.name, entry.shape
    return [write([len(found)]) + found[0], *found[1:]] if found else []


def _write_entry(e: Entry, before: tuple[str, Shape] | None, version: int) -> Iterator[bytes]:
    """What follows the name. ``before``: the form of the entry before, if it has one."""
    yield from _write_head(e, before, version)
    if not e.removes:
        yield VERSIONS[version][e.encoding].write_detail(e.detail)


def _write_head(e: Entry, before: tuple[str, Shape] | None, version: int) -> Iterator[bytes]:
    """The same without the detail."""
    codec, boxed = VERSIONS[version][e.encoding], e.boxed
    removes = codec.effect is Effect.REMOVES
    repeats = version > 1 and not removes and not boxed and before == (e.dtype.name, e.shape)  # [F-TAB-18]
    yield bytes((codec.code | BOXED * boxed | REPEAT * repeats,))
    if not removes:
        if not repeats:
            yield _write_form(e.dtype, e.shape)
        if boxed:
            yield write(e.whole) + write(e.offset)


def _write_form(dtype: DType, shape: Shape) -> bytes:
    return bytes([dtype.code, len(shape)]) + write(shape)


def _write_block(
    block: EntryBlock, names: Sequence[bytes], before: tuple[str, Shape] | None
) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Name, form and detail of each entry of a block."""
    code, form = block.made.code, block.form[block.first : block.end]
    whole = [bytes((code,)) + _write_form(dtype, shape) for dtype, shape in block.forms]
    heads = [bytes((code | REPEAT,))] * len(block)
    for i in (np.flatnonzero(form[1:] != form[:-1]) + 1).tolist():
        heads[i] = whole[form[i]]
    dtype, shape = block.forms[form[0]]
    if before != (dtype.name, shape):
        heads[0] = whole[form[0]]
    return zip(names, heads, block.made.details_of(block.first, block.end), strict=True)


def _write_names(names: list[bytes], *, tail: bool) -> list[bytes]:
    """[F-TAB-17], [F-TAB-2]"""
    if tail and kernels.LIB is not None and len(names) > FEW:
        return kernels.table_names(names)
    return [_write_name(name, last, tail=tail) for name, last in zip(names, [b"", *names], strict=False)]


def _write_name(name: bytes, last: bytes, *, tail: bool) -> bytes:
    shared = _common(name, last)
    if not tail:
        return write([shared, len(name) - shared]) + name[shared:]
    ends = _common(name[shared:][::-1], last[shared:][::-1])
    middle = name[shared : len(name) - ends]
    return write([shared, ends, len(middle)]) + middle


def _common(a: bytes, b: bytes) -> int:
    """Bytes of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def read_table(data: bytes | memoryview, where: str, version: int = CODECS.version) -> list[Entry]:
    """Inverse of :func:`write_table`. Raises FormatError."""
    return list(_TableReader(data, where, VERSIONS[version]).entries())


def read_columns(data: bytes | memoryview, where: str, version: int = CODECS.version) -> Sequence[Entry]:
    """The same, by the compiled kernels where there are any: an `EntryTable`, which costs little for each entry."""
    if kernels.LIB is None or version != CODECS.version:
        return read_table(data, where, version)
    table = np.frombuffer(data, np.uint8)
    reader = _TableReader(data, where, CODECS)
    pieces = [*reader.pieces(table)]
    return EntryTable(table, pieces) if pieces else []


PATIENCE = 8  # times in a row that the kernels are asked for nothing: what they leave alone comes in rows
AGAIN = 64  # entries, after that, before they are asked again


class _TableReader:
    """The entries of one table, one after the other."""

    def __init__(self, data: bytes | memoryview, where: str, codecs: Registry) -> None:
        self._bytes, self._where, self._codecs = VarintReader(data, where), where, codecs
        self._before: Entry | None = None

    def entries(self) -> Iterator[Entry]:
        for _ in range(self._bytes.number(MAX_ENTRIES)):  # [F-TAB-1]
            yield self._next()
        self._end()

    def pieces(self, table: npt.NDArray[np.uint8]) -> Iterator[TableRun | tuple[Entry, int]]:
        """The same, runs of them by the kernels. ``table``: all bytes, uint8 [n]."""
        r = self._bytes
        left = r.number(MAX_ENTRIES)  # [F-TAB-1]
        missed = 0  # times in a row that the kernels were asked for nothing
        while left:
            if (run := read_run(table, r.at, left, self._before)) is not None:
                r.raw(run.end - r.at)
                left -= len(run.names)
                self._before = run.last()
                missed = 0
                yield run
                continue
            missed += 1
            for _ in range(min(1 if missed < PATIENCE else AGAIN, left)):
                begins = r.at
                yield self._next(), r.at - begins
                left -= 1
        self._end()

    def _next(self) -> Entry:
        before = self._before
        last = before.name.encode() if before else b""
        name = self._name(last)
        entry = self._entry(name)
        order = (last, before.offset) if before else (b"", (-1,))
        # [F-TAB-4], [F-TAB-5]
        if (name, entry.offset) <= order or (before and name == last and not (entry.boxed and before.boxed)):
            have = f"{entry.name[:80]!r} out of order or twice"
            self._bytes.refuse("table-order", have, "entries sorted by name and offset")
        self._before = entry
        return entry

    def _end(self) -> None:
        if left := self._bytes.left:  # [F-TAB-11]
            self._bytes.refuse("table-long", f"{left} bytes after the last entry", "none")

    def _name(self, last: bytes) -> bytes:
        r = self._bytes
        shared = r.number(len(last))  # [F-TAB-2], [F-NUM-3]
        tail = r.number(len(last) - shared) if self._codecs.version > 1 else 0  # [F-NUM-3]
        return last[:shared] + bytes(r.raw(r.number(MAX_NAME))) + last[len(last) - tail :]

    def _entry(self, raw: bytes) -> Entry:
        r, where = self._bytes, self._where
        name = self._text(raw)
        code = r.byte()
        boxed = code & BOXED > 0
        repeats = self._codecs.version > 1 and code & REPEAT > 0
        codec = self._codecs.of_code(code & ~(BOXED | REPEAT * repeats))
        if codec is None:  # [F-VER-6]
            need = f"one of {len(self._codecs)}: a newer deltackpt may know it"
            r.refuse("encoding-unknown", f"encoding {code & ~BOXED}", need)
        removes = codec.effect is Effect.REMOVES
        before = self._before
        if repeats and (before is None or before.removes or removes or boxed):  # [F-TAB-18]
            need = "dtype and shape, or an entry before that has them"
            r.refuse("table-repeat", "a form that is said to repeat", need)
        if removes:
            if boxed:  # [F-TAB-9]
                r.refuse("box-outside", "a removed box", "a whole tensor")
            return Entry.removal(name, self._codecs.version)
        if repeats:
            assert before is not None
            form = Entry(name, codec.name, before.dtype, before.shape, before.shape, (0,) * len(before.shape))
        else:
            form = self._form(name, codec, boxed=boxed)
        if not codec.takes_dtype(form.dtype):  # [F-PLAIN-4], [F-PACK-1]
            r.refuse("encoding-dtype", f"{codec.name} {form.dtype.name}", codec.dtypes)
        at = f"{where}, {name[:80]!r}"
        nbytes(form.dtype, form.whole, where=at)  # [F-TAB-7]
        elements = nbytes(form.dtype, form.shape, where=at) // form.dtype.width
        stored = self._codecs.storage_shape(form.dtype, form.shape)
        detail = codec.read_detail(r, form.dtype, stored, elements)
        return Entry(name, codec.name, form.dtype, form.shape, form.whole, form.offset, detail, self._codecs.version)

    def _text(self, raw: bytes) -> str:
        """[F-TAB-3]"""
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            self._bytes.refuse("name-refused", "a name that is not UTF-8", "text")
        check_name(name, self._where)
        if name.startswith(RESERVED) or name == METADATA:  # [F-PART-9]
            need = f"no {METADATA}, and nothing that starts with {RESERVED}"
            self._bytes.refuse("name-refused", f"a tensor named {name[:80]!r}", need)
        return name

    def _form(self, name: str, codec: Codec[Any], *, boxed: bool) -> Entry:
        """An entry without its detail: dtype, shape, and what it is a box of."""
        r = self._bytes
        dtype = BY_CODE.get(r.byte())
        if dtype is None:  # [F-VER-6]
            r.refuse("dtype-unknown", "an unknown dtype code", "one of the registry")
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
            if not codec.boxes:  # [F-TAB-9]
                need = ", ".join(c.name for c in self._codecs if c.boxes)
                r.refuse("encoding-boxed", f"a box in encoding {codec.name}", need)
        return Entry(name, codec.name, dtype, shape, whole, offset)
