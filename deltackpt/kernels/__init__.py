"""The inner loops in C: compare, digest, pack, unpack. `LIB` is None where they were not compiled, or are not wanted
(``DELTACKPT_KERNELS=0``); callers then do the same in numpy, several times slower. Both give the same bytes.

The library is built at installation (build.py) and called through ctypes, which lets go of the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_int, c_int64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.kernels.build import LIBRARY, fingerprint

BEST_SCAN = 2  # of dk_scan_level: whatever the processor has

_P, _N, _I = c_void_p, c_int64, c_int
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "dk_compare": (_N, [_P, _P, _N, _I, _N, _P, _P, _P]),
    "dk_scatter": (_I, [_P, _N, _P, _I, _P, _N, _I]),
    "dk_exponents": (None, [_P, _N, _P, _P]),
    "dk_digest_start": (None, []),
    "dk_digest_run": (None, [_P, _N, _I, _N, _P]),
    "dk_digest_change": (None, [_P, _P, _P, _N, _I, _P]),
    "dk_pack_sort": (None, [_P, _P, _P, _N, *[_P] * 13]),
    "dk_pack_measure": (None, [_P, _P, _N, _I, _P, _P, _P, _P, _I, _I, _P, _P, _P, _P]),
    "dk_pack_write": (None, [_P, _P, _N, _I, _P, _P, _P, _P, _P, _I, _I, _P, _P, _P, _P]),
    "dk_population": (None, [_P, _P, _P, _P, _P, _P]),
    "dk_unpack": (_I, [_P, _N, *[_P] * 8]),
    "dk_crc32_start": (None, []),
    "dk_crc32": (ctypes.c_uint32, [_P, _N]),
    "dk_scan_level": (_I, [_I]),
    "dk_lists_read": (_I, [_P, _N, _I, _P]),
    "dk_lists_measure": (_I, [_P, _N, _I]),
    "dk_lists_write": (_I, [_P, _N, _I]),
    "dk_lists_release": (None, [_P, _N]),
}

Array = npt.NDArray[Any]


def _load() -> ctypes.CDLL | None:
    if os.environ.get("DELTACKPT_KERNELS") == "0":
        return None
    try:
        library = ctypes.CDLL(str(LIBRARY))
        library.dk_fingerprint.restype = ctypes.c_uint32
        if library.dk_fingerprint() != fingerprint():
            return None
    except (OSError, AttributeError):
        return None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.dk_digest_start()
    library.dk_crc32_start()
    library.dk_scan_level(BEST_SCAN)
    return library


LIB = _load()


def address(array: Array) -> int:
    """Where a C-contiguous array begins. The caller keeps the array alive during the call."""
    assert array.flags.c_contiguous
    return int(array.__array_interface__["data"][0])


def addresses(*arrays: Array) -> list[int]:
    return [address(array) for array in arrays]


def compare(old: Array, new: Array, first: int, room: tuple[Array, Array, Array]) -> int:
    """Where two equally long runs of unsigned words differ, into ``room``: int64 positions (index + ``first``), old and
    new words, as long as the runs. -> how many.
    """
    assert LIB is not None
    into = [address(a) for a in room]
    return int(LIB.dk_compare(address(old), address(new), len(old), old.itemsize, first, *into))


def scatter(words: Array, positions: Array, values: Array) -> None:
    """words[positions] = values, faster. ``positions``: words of 4 or 8 bytes, none negative; one that is outside is an
    IndexError, and nothing is written.
    """
    if LIB is None or not words.flags.c_contiguous:
        words[positions] = values
        return
    where, what = np.ascontiguousarray(positions), np.ascontiguousarray(values, words.dtype)
    at = address(words), len(words), address(where), where.itemsize, address(what), len(where), words.itemsize
    if LIB.dk_scatter(*at):
        raise IndexError("a position outside of the tensor")


def digest_run(words: Array, first: int) -> tuple[int, int]:
    """Both sums of a run of words that begins at element ``first``."""
    assert LIB is not None
    sums, words = np.zeros(2, np.uint64), np.ascontiguousarray(words)
    LIB.dk_digest_run(address(words), len(words), words.itemsize, first, address(sums))
    return int(sums[0]), int(sums[1])


def digest_change(positions: Array, old: Array, new: Array) -> tuple[int, int]:
    """What both sums gain when the words at ``positions`` (int64) turn from old to new."""
    assert LIB is not None
    sums = np.zeros(2, np.uint64)
    arrays = [np.ascontiguousarray(a) for a in (positions, old, new)]
    LIB.dk_digest_change(*map(address, arrays), len(positions), old.itemsize, address(sums))
    return int(sums[0]), int(sums[1])
