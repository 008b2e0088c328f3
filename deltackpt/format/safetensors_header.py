"""The header of a safetensors file, parsed strictly: all of a `Header` can be trusted.

Stricter than the format's reference reader where that one lets two readers differ: no duplicate keys, no unknown
fields, no empty or overlong names, no control characters in them. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, Final, NamedTuple, NoReturn
from weakref import WeakValueDictionary

from deltackpt.errors import FormatError
from deltackpt.format.canonical import MAX_DEPTH, MAX_MARKS, check_bounds, loads_strict
from deltackpt.format.dtypes import DTYPES, SIZE_LIMIT, nbytes
from deltackpt.format.header_columns import HeaderColumns, read_tensors
from deltackpt.format.tensor_names import METADATA, check_name

MAX_HEADER: Final = 100_000_000  # bytes of JSON; the reference reader's own limit
MAX_RANK: Final = 32  # what numpy 1 can hold

_FIELDS: Final = {"dtype", "shape", "data_offsets"}


class Tensor(NamedTuple):
    """One tensor: ``shape`` in elements, ``start`` and ``end`` in bytes from the header's ``data_start``.

    The name is text, not a path.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """``text`` is the JSON exactly as stored, padding included; the tensors are in offset order and fill the file."""

    text: bytes
    metadata: dict[str, str]
    columns: HeaderColumns
    data_start: int

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in the order of ``columns``."""
        return tuple(map(partial(tuple.__new__, Tensor), self.columns.rows()))

    @property
    def head(self) -> bytes:
        """The file's first ``data_start`` bytes: length and text."""
        return len(self.text).to_bytes(8, "little") + self.text

    @property
    def file_size(self) -> int:
        """Bytes of the file that the header is of."""
        return self.data_start + int(self.columns.ends[-1] if len(self.columns.ends) else 0)


def head_size(first: bytes, file_size: int | None, where: str) -> int:
    """How many bytes to read for `parse_header`, from the ``first`` 8 bytes of the file.

    Raises FormatError ``header-truncated`` or ``header-too-long``.
    """
    if len(first) < 8:
        raise FormatError("header-truncated", where=where, have=f"{len(first)} bytes", need="at least 8 bytes")
    length = int.from_bytes(first[:8], "little")
    if length > MAX_HEADER:  # [F-PART-1]
        raise FormatError(
            "header-too-long", where=where, have=f"a header of {length:,} bytes", need=f"at most {MAX_HEADER:,} bytes"
        )
    if file_size is not None and 8 + length > file_size:
        raise FormatError(
            "header-truncated", where=where, have=f"{file_size:,} bytes", need=f"a header of 8 + {length:,} bytes"
        )
    return 8 + length


def parse_header(head: bytes, file_size: int | None, where: str) -> Header:
    """Parse ``head``, the first 8 + n bytes of a file of ``file_size`` bytes, and check everything there is to check.

    ``file_size`` is None for a file that is yet to be written under this header.

    Raises FormatError: header-too-long, header-truncated, json-*, header-field, name-refused, dtype-unknown,
    shape-overflow, shape-bits, offsets-length, offsets-overlap, offsets-gap, offsets-end.
    """
    size = head_size(head, file_size, where)
    if len(head) < size:
        raise FormatError("header-truncated", where=where, have=f"{len(head):,} bytes", need=f"{size:,} bytes")
    text = head[8:size]
    if not text.startswith(b"{"):  # [F-PART-1]
        raise FormatError("json-syntax", where=where, have=repr(text[:16]), need="a JSON object")
    if (header := _KNOWN.get(text)) is None:
        header = _KNOWN[text] = Header(text, *_read(text, where), size)
    if file_size is not None and header.file_size != file_size:  # [F-PART-5]
        raise FormatError("offsets-end", where=where, have=f"{file_size:,} bytes", need=f"{header.file_size:,} bytes")
    return header


# Those in use, by their text: files and layouts of the steps of a run nearly always have the same.
_KNOWN: WeakValueDictionary[bytes, Header] = WeakValueDictionary()


def _read(text: bytes, where: str) -> tuple[dict[str, str], HeaderColumns]:
    """Metadata, and the tensors in the order of their bytes, checked."""
    if len(text) > MAX_MARKS:  # a shorter text has no more marks, and the kernels take no deeper one
        check_bounds(text, MAX_HEADER, MAX_DEPTH, MAX_MARKS, where)
    if (columns := read_tensors(text)) is not None:
        return _metadata(loads_strict(columns[0], limit=MAX_HEADER, where=where), where), columns[1]
    entries = loads_strict(text, limit=MAX_HEADER, where=where)  # checks the same
    metadata = _metadata(entries.pop(METADATA, {}), where)
    tensors = []
    for name, entry in entries.items():
        try:
            tensors.append(_tensor(name, entry))
        except FormatError as error:
            raise FormatError(error.code, where=_at(where, name), have=error.have, need=error.need) from error
    # Empty tensors share an offset with a neighbor; the sort is stable, so these stay in the header's order.
    tensors.sort(key=attrgetter("start", "end"))
    end = 0
    for tensor in tensors:
        if tensor.start != end:  # [F-PART-5]
            code = "offsets-overlap" if tensor.start < end else "offsets-gap"
            raise FormatError(
                code, where=_at(where, tensor.name), have=f"start {tensor.start:,}", need=f"start {end:,}"
            )
        end = tensor.end
    return metadata, HeaderColumns.of(tensors)


def build_header(tensors: Iterable[Tensor], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file with these tensors: 8-byte length, compact JSON, spaces up to a multiple of 8.

    ``__metadata__`` comes first (left out if empty) with sorted keys, then the tensors as given, which is in offset
    order. The same arguments give the same bytes. Raises what `parse_header` raises: no header is written that it would
    refuse.
    """
    entries: dict[str, Any] = {METADATA: dict(sorted(metadata.items()))} if metadata else {}
    for t in tensors:
        if t.name in entries or t.name == METADATA:
            raise FormatError("name-refused", where="new header", have=f"the name {t.name[:80]!r}", need="a free name")
        entries[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": (t.start, t.end)}
    try:
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeError as error:
        raise FormatError("name-refused", where="new header", have=str(error), need="valid Unicode") from error
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    parse_header(head, None, "new header")
    return head


def _metadata(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):  # [F-PART-6]
        raise FormatError("header-field", where=_at(where, METADATA), have="other values", need="an object of strings")
    return value


def _tensor(name: str, entry: Any) -> Tensor:
    """One entry of the header, checked by itself; how tensors lie beside each other is `parse_header`'s to check."""
    check_name(name, "tensor")
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:  # [F-PART-3]
        have = ", ".join(sorted(entry))[:80] if isinstance(entry, dict) else "no object"
        _refuse("header-field", have or "no field", "dtype, shape and data_offsets alone")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list):  # [F-PART-3]
        _refuse("header-field", "other types", "dtype a string, shape and data_offsets arrays")
    if len(shape) > MAX_RANK or len(offsets) != 2:  # [F-PART-3]
        _refuse("header-field", f"{len(shape)} dims, {len(offsets)} offsets", f"at most {MAX_RANK} dims, 2 offsets")
    for number in (*shape, *offsets):
        if type(number) is not int or number < 0:  # [F-PART-2]; isinstance would take true for one
            _refuse("header-field", repr(number)[:80], "integers from 0 in shape and data_offsets")
    if dtype not in DTYPES:  # [F-PART-3] [F-VER-3]
        _refuse("dtype-unknown", dtype[:80], f"one of {', '.join(DTYPES)}")
    start, end = offsets
    size = nbytes(DTYPES[dtype], shape)
    if end - start != size or end >= SIZE_LIMIT:  # [F-PART-5]
        _refuse("offsets-length", f"{end - start:,} bytes", f"{size:,} bytes, below 2^62")
    return Tensor(name, dtype, tuple(shape), start, end)


def _refuse(code: str, have: str, need: str) -> NoReturn:
    raise FormatError(code, where="tensor", have=have, need=need)  # `parse_header` knows the file and the name


def _at(where: str, name: str) -> str:
    return f"{where}: tensor {name[:80]!r}"
