"""The tensors of a header by the compiled kernels: of one that is written as nearly all are, with many tensors in it.

`deltackpt.format.safetensors_header` reads all others, and says what is wrong with a defect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt import kernels
from deltackpt.format.dtypes import DTYPES
from deltackpt.format.tensor_names import MAX_NAME, METADATA, has_control
from deltackpt.kernels import address

LEAST = 50  # bytes of a tensor in a header: there is no more room asked for than the text pays for
MAX_DIMS = 8

_ROW = np.dtype(
    [
        *((name, np.int64) for name in ("name", "name_bytes", "start", "end")),
        ("dims", np.int64, (MAX_DIMS,)),
        *((name, np.int32) for name in ("dtype", "rank", "escaped", "unused")),
    ]
)
_WHOLE = [dtype for dtype in DTYPES.values() if dtype.bits == 8 * dtype.width]
_NAMES = np.array(
    [(dtype.name.encode(), len(dtype.name), dtype.width) for dtype in _WHOLE],
    [("name", "S16"), ("name_bytes", np.int64), ("width", np.int64)],
)
_TEXT = rb'"[^"\\\x00-\x1f\x7f-\xff]*"'
_METADATA = re.compile(rb'\{"__metadata__":(\{(?:%s:%s(?:,%s:%s)*)?\}),' % (_TEXT, _TEXT, _TEXT, _TEXT))

Ints = npt.NDArray[np.int64]
Form = tuple[str, tuple[int, ...]]  # dtype, and shape in elements


@dataclass(frozen=True, eq=False)
class HeaderColumns:
    """The tensors of a header, in the order of their bytes, which fill the file. Of each, int64 [tensors]: ``starts``
    and ``ends`` in bytes from the first tensor on, and ``form``, its number among ``forms``.
    """

    names: Sequence[str]
    starts: Ints
    ends: Ints
    form: Ints
    forms: Sequence[Form]

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, str, tuple[int, ...], int, int]]) -> HeaderColumns:
        """``tensors``: name, dtype, shape, first byte and end of each."""
        known: dict[Form, int] = {}
        form = np.array([known.setdefault((t[1], t[2]), len(known)) for t in tensors], np.int64)
        starts, ends = (np.array([t[field] for t in tensors], np.int64) for field in (3, 4))
        return cls([t[0] for t in tensors], starts, ends, form, list(known))

    def rows(self) -> list[tuple[str, str, tuple[int, ...], int, int]]:
        """What `of` takes."""
        dtypes, shapes = ([form[i] for form in self.forms] for i in (0, 1))
        form = self.form.tolist()
        of_each = [dtypes[i] for i in form], [shapes[i] for i in form]
        return list(zip(self.names, *of_each, self.starts.tolist(), self.ends.tolist(), strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeaderColumns) and self.rows() == other.rows()


def read_tensors(text: bytes) -> tuple[bytes, HeaderColumns] | None:
    """The object of the metadata ("{}" if there is none), and the tensors. None where it has to be read in Python."""
    if kernels.LIB is None:
        return None
    match = _METADATA.match(text)
    first = match.end() if match else 1
    data = np.frombuffer(text, np.uint8)
    rows = np.empty(len(text) // LEAST + 1, _ROW)
    at = address(data), len(data), first, address(_NAMES), len(_NAMES), address(rows), len(rows)
    if (found := kernels.LIB.dk_header_read(*at)) < 0:
        return None
    rows = rows[:found]
    if not (rows["start"][:1] == 0).all() or (rows["start"][1:] != rows["end"][:-1]).any():
        rows = rows[np.lexsort((rows["end"], rows["start"]))]  # stable: empty tensors stay in the header's order
        if rows["start"][0] or (rows["start"][1:] != rows["end"][:-1]).any():
            return None
    names = _names(text, rows)
    if names is None or len(set(names)) != len(names):
        return None
    form, forms = _forms(rows)
    # Copies: they are kept, and the rows, for as many tensors as the text could hold, are not.
    return match[1] if match else b"{}", HeaderColumns(names, rows["start"].copy(), rows["end"].copy(), form, forms)


def _names(text: bytes, rows: npt.NDArray[Any]) -> list[str] | None:
    """The name of each. None where escapes make one that may be none."""
    spans = zip(rows["name"].tolist(), (rows["name"] + rows["name_bytes"]).tolist(), strict=True)
    if not rows["escaped"].any():
        if not text.isascii():
            return [text[a:b].decode() for a, b in spans]
        whole = text.decode("ascii")
        return [whole[a:b] for a, b in spans]
    quoted = b",".join(text[a - 1 : b + 1] for a, b in spans)
    try:
        names: list[str] = json.loads(b"[%s]" % quoted)
        sizes = [len(name.encode()) for name in names]
    except ValueError:  # what no parser takes, and surrogates
        return None
    if max(sizes) > MAX_NAME or has_control("".join(names)) or METADATA in names:
        return None
    return names


def _forms(rows: npt.NDArray[Any]) -> tuple[Ints, list[Form]]:
    """Dtype and shape of each, by number, and all that there are."""
    same = (rows["dtype"][1:] == rows["dtype"][:-1]) & (rows["rank"][1:] == rows["rank"][:-1])
    outside = np.arange(MAX_DIMS) >= rows["rank"][:, None]
    dims = np.where(outside, 0, rows["dims"])
    cuts = [0, *(np.flatnonzero(~(same & (dims[1:] == dims[:-1]).all(axis=1))) + 1).tolist(), len(rows)]
    known: dict[Form, int] = {}
    runs = [(_WHOLE[rows["dtype"][a]].name, tuple(dims[a, : rows["rank"][a]].tolist())) for a in cuts[:-1]]
    numbers = [known.setdefault(form, len(known)) for form in runs]
    return np.repeat(np.array(numbers, np.int64), np.diff(cuts)), list(known)
