"""The layout: which files a checkpoint has, byte for byte but for the tensors' values (FORMAT section "Layout").

An object of its own, since it hardly ever changes: the headers of the safetensors files exactly as stored, and where
the side files' bytes are. With the values of the tensors it rebuilds every file of the directory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from operator import eq
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from deltackpt.errors import FormatError
from deltackpt.format.canonical import dumps, loads_strict
from deltackpt.format.manifest import Fields, File
from deltackpt.format.names import check_path
from deltackpt.format.record import RecordKind
from deltackpt.format.safetensors_header import Header, Tensor, parse_header
from deltackpt.format.state_digest import StateText
from deltackpt.format.tensor_columns import TensorColumns
from deltackpt.format.tensor_names import RESERVED

FORMAT = "deltackpt-layout"
VERSION = 1
MAX_LAYOUT = 256 << 20
MAX_FILES = 100_000
MAX_TENSORS = 1 << 20

_KIND = RecordKind(FORMAT, VERSION, "layout", "layout-field")


@dataclass(frozen=True)
class Shard:
    """A safetensors file of the checkpoint: its relative POSIX path, and its header verbatim, padding included."""

    path: str
    header: Header

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.header.file_size


@dataclass(frozen=True)
class Side:
    """A file beside the weights: its path in the checkpoint, and the object that holds it."""

    path: str
    file: File


class TensorsByName:
    """The tensors of some headers, each by its name, in the order of the names' bytes."""

    def __init__(self, headers: Sequence[Header]) -> None:
        self._headers = headers
        held = [name for header in headers for name in header.columns.names]
        order = sorted(range(len(held)), key=held.__getitem__)  # code points sort as their UTF-8 bytes do
        self.names = [held[i] for i in order]
        if any(map(eq, self.names, self.names[1:])):  # of one that several headers have, the last
            order = [i for i, after in zip(order, [*order[1:], -1], strict=True) if after < 0 or held[i] != held[after]]
            self.names = [held[i] for i in order]
        self._order = np.array(order, np.int64)

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """Each by its name."""
        held = [*chain.from_iterable(header.tensors for header in self._headers)]
        return dict(zip(self.names, map(held.__getitem__, self._order.tolist()), strict=True))

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """Where each name is in that order."""
        return dict(zip(self.names, range(len(self.names)), strict=True))

    @cached_property
    def columns(self) -> TensorColumns:
        """The same tensors."""
        return TensorColumns.of(self._headers, self._order)

    @classmethod
    def of(cls, headers: Sequence[Header]) -> TensorsByName:
        """Those that are in use already, if the headers are the same: nearly always, in the steps of a run."""
        texts = tuple(header.text for header in headers)
        if (found := _KNOWN.get(texts)) is None:
            found = _KNOWN[texts] = cls(headers)
        return found

    @cached_property
    def state_text(self) -> StateText:
        """See `Layout`."""
        return StateText(self.names, self.columns.form, [(dtype.name, shape) for dtype, shape in self.columns.forms])


_KNOWN: WeakValueDictionary[tuple[bytes, ...], TensorsByName] = WeakValueDictionary()


@dataclass(frozen=True)
class Layout:
    """Fields in the order of the spec: every file of the checkpoint."""

    shards: tuple[Shard, ...]
    side: tuple[Side, ...]

    @cached_property
    def named(self) -> TensorsByName:
        """The tensors of all shards."""
        return TensorsByName.of([shard.header for shard in self.shards])

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Every tensor by name, in the order of the names' bytes."""
        return self.named.tensors

    @property
    def state_text(self) -> StateText:
        """What the state digests of steps of this layout have in common."""
        return self.named.state_text

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(s.size for s in self.shards) + sum(s.file.size for s in self.side)

    def encode(self) -> bytes:
        """The object's bytes: canonical JSON."""
        return dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "shards": [{"path": s.path, "header": s.header.text.decode()} for s in self.shards],
                "side": [{"path": s.path, "file": s.file.to_dict()} for s in self.side],
            }
        )


def decode(data: bytes, where: str) -> Layout:
    """Parse and check a layout. Raises FormatError."""
    value = _KIND.check(loads_strict(data, limit=MAX_LAYOUT, where=where), where)
    if value.keys() != {"format", "version", "shards", "side"}:  # [F-LAY-1] [F-VER-5]
        raise _refuse(where, "other fields", "format, version, shards and side")
    if not isinstance(value["shards"], list) or not isinstance(value["side"], list):  # [F-LAY-1]
        raise _refuse(where, "shards or side of another type", "lists")
    if len(value["shards"]) + len(value["side"]) > MAX_FILES:  # [F-LAY-5]
        raise _refuse(where, "too many files", f"at most {MAX_FILES:,}")
    shards, tensors = [], 0
    for item in value["shards"]:
        shards.append(_shard(item, where))
        tensors += len(shards[-1].header.columns.names)
        if tensors > MAX_TENSORS:  # [F-LAY-5]
            raise _refuse(where, f"more than {MAX_TENSORS:,} tensors", f"at most {MAX_TENSORS:,}")
    layout = Layout(tuple(shards), tuple(_side(item, where) for item in value["side"]))
    paths = [*(s.path for s in layout.shards), *(s.path for s in layout.side)]
    if len(set(paths)) != len(paths) or _nested(paths):  # [F-LAY-3]
        raise _refuse(where, "a path twice, or one inside another", "each file once")
    if len(layout.named.names) != tensors:  # [F-LAY-4]
        raise _refuse(where, "a tensor in two shards", "each tensor once")
    names = layout.named.names
    if any(name.startswith(RESERVED) for name in names[bisect_left(names, RESERVED) :][:1]):  # [F-PART-9]
        need = f"names that do not start with {RESERVED}"
        raise FormatError("name-refused", where=where, have="a reserved tensor name", need=need)
    return layout


def _nested(paths: list[str]) -> bool:
    """Is a file also the folder of another? It then stands right before one of its files, where NUL takes the place
    of the slash: no path has one.
    """
    ordered = sorted(path.replace("/", "\0") for path in paths)
    return any(b.startswith(f"{a}\0") for a, b in pairwise(ordered))


def _shard(item: Any, where: str) -> Shard:
    if (
        not isinstance(item, dict)
        or item.keys() != {"path", "header"}
        or not all(isinstance(v, str) for v in item.values())
    ):  # [F-LAY-1]
        raise _refuse(where, "a shard with other fields", "path and header")
    check_path(item["path"], where)
    text = item["header"].encode()
    head = len(text).to_bytes(8, "little") + text
    return Shard(item["path"], parse_header(head, None, f"{where}, header of {item['path'][:80]!r}"))


def _side(item: Any, where: str) -> Side:
    if not isinstance(item, dict) or item.keys() != {"path", "file"} or not isinstance(item["path"], str):  # [F-LAY-1]
        raise _refuse(where, "a side file with other fields", "path and file")
    check_path(item["path"], where)
    try:
        file = Fields({}, where).file(item["file"], "side")
    except FormatError as error:
        if error.code != "manifest-field":
            raise
        raise FormatError("layout-field", where=error.where, have=error.have, need=error.need) from error
    return Side(item["path"], file)


def _refuse(where: str, have: str, need: str) -> FormatError:
    return FormatError("layout-field", where=where, have=have, need=need)
