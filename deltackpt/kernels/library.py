"""The compiled library, loaded, with its signatures; or why it is not, so that a process can report what it uses."""

from __future__ import annotations

import ctypes
import os
import warnings
from ctypes import c_int, c_int64, c_uint32, c_void_p
from typing import Any

from deltackpt.kernels import build

CHOICE = "DELTACKPT_KERNELS"  # "0": numpy is wanted, which is no fallback and worth no warning

_P, _N, _I = c_void_p, c_int64, c_int
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {  # of every exported function: result, arguments
    "dk_fingerprint": (c_uint32, []),
    "dk_compare_level": (_I, [_I]),
    "dk_compare": (_N, [_P, _P, _N, _I, _N, _P, _P, _P]),
    "dk_scatter": (_I, [_P, _N, _P, _I, _P, _N, _I]),
    "dk_guard_add": (_N, [_P, _N]),
    "dk_guard_torn": (_I, [_N]),
    "dk_guard_remove": (None, [_N]),
    "dk_digest_start": (None, []),
    "dk_digest_run": (None, [_P, _N, _I, _N, _P]),
    "dk_digest_rows": (None, [_P, _N, _N, _I, _N, _P, _P]),
    "dk_digest_change": (None, [_P, _P, _P, _N, _I, _P]),
    "dk_diff_many": (None, [_P, _N, _I, _P, _P, _P]),
    "dk_population": (None, [_P, _P, _P, _P, _P, _P]),
    "dk_unpack": (_I, [_P, _N, *[_P] * 8]),
    "dk_crc32_start": (None, []),
    "dk_crc32": (ctypes.c_uint32, [_P, _N]),
    "dk_scan_level": (_I, [_I]),
    "dk_lists_read": (_I, [_P, _N, _I, _P]),
    "dk_lists_chain": (_I, [_P, _N, _N, _N, _N, _I]),
    "dk_move": (_I, [_P, _P]),
    "dk_rebuild": (_I, [_P, _N]),
    "dk_lists_measure": (_I, [_P, _N, _I]),
    "dk_lists_write": (_I, [_P, _N, _I]),
    "dk_table_names": (_N, [_P, _P, _N, _P, _P]),
    "dk_lists_details": (_N, [_P, _N, _P, _P]),
    "dk_lists_release": (None, [_P, _N]),
    "dk_xxh3_level": (_I, [_I]),
    "dk_compare_hashed": (None, [_P, _N]),
    "dk_xxh3_many": (None, [_P, _N, _I, _P]),
    "dk_scatter_many": (_N, [_P, _N]),
    "dk_copy_many": (None, [_P, _N]),
    "dk_table_read": (None, [_P]),
    "dk_decode_tables": (None, [_P, _P, _N]),
    "dk_json_scan": (_N, [_P, _N, _N, _N]),
    "dk_header_read": (_N, [_P, _N, _N, _P, _N, _P, _N]),
}
BEST_SCAN = 2  # of dk_scan_level, dk_xxh3_level and dk_compare_level: whatever the processor has


def load() -> tuple[ctypes.CDLL | None, str | None]:
    """The library and None, or None and why numpy does the work.

    Warns (RuntimeWarning) unless the environment chose numpy, and says what to install. A library that was made from
    other sources than those beside it counts as missing: an update that could not compile leaves an old one.
    """
    if os.environ.get(CHOICE) == "0":
        return None, f"{CHOICE}=0"
    library, reason = _open()
    if library is None:
        warnings.warn(
            f"deltackpt works in numpy, several times slower than with its compiled kernels: {reason}. "
            f"Install a C compiler (gcc or clang) and run: python {build.HERE / 'build.py'} "
            f"({CHOICE}=0 chooses numpy, and says nothing.)",
            RuntimeWarning,
            stacklevel=3,
        )
    return library, reason


def _open() -> tuple[ctypes.CDLL | None, str | None]:
    if not build.LIBRARY.exists():
        return None, f"there is no {build.LIBRARY}"
    try:
        library = ctypes.CDLL(str(build.LIBRARY))
        if _function(library, "dk_fingerprint")() != build.fingerprint():
            return None, f"{build.LIBRARY} was made from other sources than those beside it"
        for name in SIGNATURES:
            _function(library, name)
    except (OSError, AttributeError) as error:
        return None, str(error)
    library.dk_digest_start()
    library.dk_crc32_start()
    library.dk_compare_level(BEST_SCAN)
    library.dk_scan_level(BEST_SCAN)
    library.dk_xxh3_level(BEST_SCAN)
    return library, None


def _function(library: ctypes.CDLL, name: str) -> Any:
    function = getattr(library, name)
    function.restype, function.argtypes = SIGNATURES[name]
    return function
