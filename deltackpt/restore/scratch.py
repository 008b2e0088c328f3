"""Copies of tensors that a step is rebuilt in: small ones in memory, large ones in temporary files, so that memory does
not follow the largest tensor.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress

import numpy as np

from deltackpt.patch.base import Bytes
from deltackpt.util.mapped_file import FileMapping

SETTING = "DELTACKPT_SPILL"  # bytes of a tensor above which its copy is in a file of TMPDIR; its pages are the system's
SPILL = 64 << 20
_PIECE = 8 << 20


def writable_copy(data: Bytes) -> Bytes:
    """The bytes of a tensor, uint8 [n], to be written to; in memory too where a temporary file has no room."""
    copy = _room(data.nbytes)
    for at in range(0, len(data), _PIECE):
        copy[at : at + _PIECE] = data[at : at + _PIECE]
    return copy


def _room(size: int) -> Bytes:
    if size > int(os.environ.get(SETTING, SPILL)):
        with suppress(OSError, AttributeError):  # not every system can promise the room
            return _in_a_file(size)
    return np.empty(size, np.uint8)


def _in_a_file(size: int) -> Bytes:
    with tempfile.TemporaryFile(prefix="deltackpt-") as file:
        os.posix_fallocate(file.fileno(), 0, size)  # a page without room would end the process
        found: Bytes = FileMapping(file.fileno(), size, writable=True).data
        return found
