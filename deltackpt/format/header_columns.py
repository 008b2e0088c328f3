"""The tensors of a header by the compiled kernels: of one that is written as nearly all are, with many tensors in it.

`deltackpt.format.safetensors_header` reads all others, and says what is wrong with a defect.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt import kernels
from deltackpt.format.dtypes import DTYPES
from deltackpt.kernels import address

LEAST = 50  # bytes of a tensor in a header: there is no more room asked for than the text pays for
MAX_DIMS = 8

_ROW = np.dtype(
    [
        *((name, np.int64) for name in ("name", "name_bytes", "start", "end")),
        ("dims", np.int64, (MAX_DIMS,)),
        ("dtype", np.int32),
        ("rank", np.int32),
    ]
)
_WHOLE = [dtype for dtype in DTYPES.values() if dtype.bits == 8 * dtype.width]
_NAMES = np.array(
    [(dtype.name.encode(), len(dtype.name), dtype.width) for dtype in _WHOLE],
    [("name", "S16"), ("name_bytes", np.int64), ("width", np.int64)],
)
_TEXT = rb'"[^"\\\x00-\x1f\x7f-\xff]*"'
_METADATA = re.compile(rb'\{"__metadata__":(\{(?:%s:%s(?:,%s:%s)*)?\}),' % (_TEXT, _TEXT, _TEXT, _TEXT))

Columns = tuple[list[str], list[str], list[tuple[int, ...]], list[int], list[int]]


def read_tensors(text: bytes) -> tuple[bytes, Columns] | None:
    """The object of the metadata ("{}" if there is none), and of the tensors, in the order of their bytes, which fill
    the file from 0 on: names, dtypes, shapes, first bytes and ends. None where it has to be read in Python.
    """
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
    whole = text.decode("ascii", "replace")
    begins = rows["name"].tolist()
    names = [whole[a : a + n] for a, n in zip(begins, rows["name_bytes"].tolist(), strict=True)]
    if len(set(names)) != len(names):
        return None
    dtypes, shapes = _forms(rows)
    return match[1] if match else b"{}", (names, dtypes, shapes, rows["start"].tolist(), rows["end"].tolist())


def _forms(rows: npt.NDArray[Any]) -> tuple[list[str], list[tuple[int, ...]]]:
    """Dtypes and shapes; neighbors of one form share them."""
    same = (rows["dtype"][1:] == rows["dtype"][:-1]) & (rows["rank"][1:] == rows["rank"][:-1])
    outside = np.arange(MAX_DIMS) >= rows["rank"][:, None]
    dims = np.where(outside, 0, rows["dims"])
    cuts = [0, *(np.flatnonzero(~(same & (dims[1:] == dims[:-1]).all(axis=1))) + 1).tolist(), len(rows)]
    dtypes: list[str] = []
    shapes: list[tuple[int, ...]] = []
    for a, b in pairwise(cuts):
        dtypes += [_WHOLE[rows["dtype"][a]].name] * (b - a)
        shapes += [tuple(dims[a, : rows["rank"][a]].tolist())] * (b - a)
    return dtypes, shapes
