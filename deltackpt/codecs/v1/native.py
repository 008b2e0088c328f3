"""`packed` by the compiled kernels: what `packed` does in numpy, byte for byte, in one pass a tile."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from deltackpt import kernels
from deltackpt.codecs.bits import Ints, starts
from deltackpt.codecs.types import DecodeBuffer
from deltackpt.codecs.v1.exponent_lists import Near
from deltackpt.codecs.v1.steps import EXPONENTS, Elements, Scale
from deltackpt.codecs.v1.tile_index import TileIndex, check, check_counts
from deltackpt.codecs.v1.tiles import Grid
from deltackpt.errors import FormatError
from deltackpt.format.dtypes import DType, uint
from deltackpt.kernels import address, addresses


class _Grid(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in ("lead", "height", "width", "rows", "columns", "tile_height", "tile_width")]


class _Type(ctypes.Structure):
    _fields_ = [(name, c_int32) for name in ("width", "exponent_start", "exponent_bits")]


class _Near(ctypes.Structure):
    _fields_ = [(name, c_int32) for name in ("threshold", "classes")]


class _Stream(ctypes.Structure):
    _fields_ = [(name, c_void_p) for name in ("grid", "near", "type", "base", "population", "local", "raw")]
    _fields_ += [(name, c_int32) for name in ("ceiling", "exception_k", "wide")]


class _Shape:
    """Grid, dtype and lists as the kernels take them: ``pointers`` to structures that live as long as this."""

    def __init__(self, grid: Grid, dtype: DType, near: Near) -> None:
        sizes = (grid.lead, grid.height, grid.width, grid.rows, grid.columns, grid.tile_height, grid.tile_width)
        self._held = _Grid(*sizes), _Type(dtype.width, *dtype.exponent), _Near(near.threshold, near.classes)
        self.grid, self.type, self.near = map(ctypes.addressof, self._held)


_shape = lru_cache(1024)(_Shape)  # a step's tensors have few, and the next step's the same ones


def decode(
    directory: TileIndex,
    payload: memoryview,
    base: Elements,
    dtype: DType,
    where: str,
    buffer: DecodeBuffer | None = None,
) -> tuple[npt.NDArray[Any], Elements]:
    """`packed.decode`, of words [n]."""
    stream = _Unpacking(directory, payload, np.ascontiguousarray(base), dtype, where)
    total = int(directory.counts.sum())
    positions: npt.NDArray[Any]
    if buffer is not None and len(base) <= 1 << 32:
        positions, values = buffer.take(total, dtype.width)
    else:
        positions, values = np.empty(total, np.int64), np.empty(total, uint(dtype.width))
    stream.run(positions, values)
    return positions, values


def decode_into(directory: TileIndex, payload: memoryview, elements: Elements, dtype: DType, where: str) -> None:
    """`packed.decode_into`, for contiguous words [n]."""
    stream = _Unpacking(directory, payload, elements, dtype, where)
    wide = np.uint32 if len(elements) <= 1 << 32 else np.int64
    stream.run(np.empty(int(directory.tile_changes.max(initial=0)), wide), None)


class _Unpacking:
    """A tensor's tiles, checked as far as that takes no memory that follows its counts, about to be unpacked."""

    def __init__(self, d: TileIndex, payload: memoryview, base: Elements, dtype: DType, where: str) -> None:
        assert kernels.LIB is not None
        self._shape, self._base, self._where = _shape(d.grid, dtype, d.near), base, where
        population = np.zeros((d.grid.tiles, d.near.classes), np.int64)
        local = np.zeros(0, np.uint32)
        scan = (address(base), self._shape.type, self._shape.grid, self._shape.near)
        if d.near.classes:
            kernels.LIB.dk_population(*scan, address(population), None)
        spans = _spans(population, d.grid)
        check_counts(d, spans, where)
        check(d, payload, where)
        begins = starts(population.ravel()) if d.near.classes else population
        if d.near.classes:
            local, at = np.empty(int(begins[-1]), np.uint32), begins[:-1].copy()
            kernels.LIB.dk_population(*scan, address(at), address(local))
        self._tables = [np.ascontiguousarray(a, np.int64) for a in (d.counts, spans, d.unary, d.lengths)]
        self._tables.append(np.frombuffer(payload, np.uint8))
        self._held = begins, local, _raw_bits(d.scale, dtype)
        self._scale = d.scale.ceiling, d.exception_k

    def run(self, positions: npt.NDArray[Any], values: Elements | None) -> None:
        """All changes into ``positions`` and ``values``, or, if that is None, into the base, and those of one tile at a
        time into ``positions``.
        """
        assert kernels.LIB is not None
        shape = (self._shape.grid, self._shape.near, self._shape.type, address(self._base))
        stream = _Stream(*shape, *addresses(*self._held), *self._scale, positions.itemsize)
        tile = np.zeros(1, np.int64)
        made = address(positions), None if values is None else address(values), address(tile)
        tables = addresses(*self._tables)
        code = kernels.LIB.dk_unpack(ctypes.addressof(stream), len(self._tables[0]), *tables, *made)
        if code:
            _refuse(code, f"{self._where}, tile {tile[0]}")


def _spans(population: Ints, grid: Grid) -> Ints:
    if not population.shape[1]:
        return np.full((grid.tiles, 1), grid.span)
    return np.concatenate([np.full((grid.tiles, 1), grid.span), population], axis=1)


@lru_cache(1024)
def _raw_bits(scale: Scale, dtype: DType) -> npt.NDArray[np.uint8]:
    return scale.raw_bits(np.arange(EXPONENTS, dtype=np.uint16), dtype.width)


# By the code that the kernel returns, from 1. [F-PACK-4] twice, [F-PACK-6], [F-LIST-2], [F-TILE-3], [F-LIST-1],
# [F-STEP-2], [F-BIT-2]
_DEFECTS: tuple[tuple[str, str, str], ...] = (
    ("tile-short", "a tile shorter than its sections", "all of them"),
    ("tile-length", "a tile of another length than its contents", "an exact fit"),
    ("unary-count", "unary codes that do not add up", "one per gap and two per exception"),
    ("gap-outside", "a gap that runs past the end", "positions inside"),
    ("position-outside", "a position past the tile's edge", "one inside"),
    ("list-wrong", "a near element among the far ones", "each in its list"),
    ("step-outside", "a step wider than its element", "no more bits than it has"),
    ("padding", "a set bit in the padding of a section", "zeros"),
)


def _refuse(code: int, where: str) -> NoReturn:
    name, have, need = _DEFECTS[code - 1]
    raise FormatError(name, where=where, have=have, need=need)
