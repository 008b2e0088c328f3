"""Room for what is as long as a tensor: in memory, or in a temporary file, so that memory does not follow the largest
tensor.
"""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from deltackpt.errors import UsageError
from deltackpt.util import reuse
from deltackpt.util.mapped_file import FileMapping

SETTING = "DELTACKPT_SPILL"  # bytes above which room is in a file of TMPDIR; its pages are the system's
SPILL = 64 << 20


def spill_above() -> int:
    """Bytes of room above which it is in a temporary file. Raises UsageError ``usage`` for a setting that is none."""
    stated = os.environ.get(SETTING, "")
    if not stated:
        return SPILL
    if not re.fullmatch("[0-9]{1,18}", stated):
        raise UsageError("usage", where=SETTING, have=repr(stated)[:80], need="a number of bytes")
    return int(stated)


def room(size: int) -> npt.NDArray[np.uint8]:
    """So many bytes to be written to, uint8 [size], of any contents; in memory too where a temporary file has no
    place."""
    if size > spill_above():
        with suppress(OSError, AttributeError):  # not every system can promise the place
            return _in_a_file(size)
    found: npt.NDArray[np.uint8] = reuse.empty(size, np.uint8)
    return found


def _in_a_file(size: int) -> npt.NDArray[np.uint8]:
    with tempfile.TemporaryFile(prefix="deltackpt-") as file:
        os.posix_fallocate(file.fileno(), 0, size)  # a page without a place would end the process
        return FileMapping(file.fileno(), size, writable=True).data
