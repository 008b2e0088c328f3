"""Files mapped to be read; and files mapped to be changed in place: their pages are mapped many at once, huge where the
system can, and unmapped when done.

A fault for each page of 4 KiB, and a page table entry to mark, would cost more than all that is written.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from deltackpt.kernels import address

HUGE = 2 << 20  # bytes of a huge page; where there are none it is a convenient run of small ones
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # Linux 5.14; not in Python's mmap
_COLLAPSE = 25  # Linux 6.1
_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 14)  # Linux alone has it; what a system does not know it refuses
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MMAP, _MUNMAP = _LIBC.mmap, _LIBC.munmap
_MMAP.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_MMAP.restype = ctypes.c_void_p
_MUNMAP.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FSTATFS = _LIBC.fstatfs
_FSTATFS.argtypes = [ctypes.c_int, ctypes.c_void_p]
_FAILED = ctypes.c_void_p(-1).value
_TMPFS = 0x01021994  # of statfs
_FIXED, _NORESERVE = 0x10, 0x4000  # of Linux's mmap
TOGETHER = 16 << 20  # bytes of small runs that are released at once

Span = tuple[int, int]  # first byte and end in the file


class MappedFile:
    """A writable mapping of the first ``size`` bytes of a file, for work on ``spans`` of it, each of them once.

    With ``keep`` all pages stay mapped when the work on them is done. It holds no descriptor. Raises OSError.
    """

    def __init__(self, fd: int, size: int, spans: Iterable[Span], *, keep: bool = False) -> None:
        self._all = FileMapping(fd, size, writable=True).data
        self._size = size
        self.in_memory = in_memory(fd)  # on a tmpfs
        self.keep = keep
        self._waiting = np.zeros(-(-size // HUGE), np.int64)  # spans that are not done, for each huge page
        self._lock = threading.Lock()
        for span in spans:
            self._waiting[_blocks(span)] += 1
        with suppress(OSError):
            advise(self._all, _HUGEPAGE, 0, size)

    def bytes_of(self, span: Span) -> npt.NDArray[np.uint8]:
        """The bytes of a span: uint8 [end - start], writable, a view of the file."""
        return self._all[slice(*span)]

    def make_writable(self) -> None:
        """Let all pages be written to without a fault, where the system has written some of them back."""
        self.populate((0, self._size), write=True)

    def populate(self, span: Span, *, write: bool) -> None:
        """Map all pages of a span; with ``write`` such that writing to them causes no fault.

        A file in memory is not told when a page is first written to: any page that is mapped will do, and sixteen of
        them are mapped by one fault. So small spans of it are left to faults.
        """
        blocks, write = _blocks(span), write and not self.in_memory
        if blocks.start < blocks.stop and not self._is_light(span):
            with suppress(OSError):  # an older kernel does not know it, and maps page by page
                self._advise(_POPULATE_WRITE if write else _POPULATE_READ, blocks.start, blocks.stop)

    def release(self, span: Span) -> None:
        """A span is not used any more: pages that no other span waits for are unmapped from this process.

        Small spans of a file in memory go with the mapping.
        """
        if self.keep or self._is_light(span):
            return
        blocks = _blocks(span)
        with self._lock:
            self._waiting[blocks] -= 1
            free = blocks.start + np.flatnonzero(self._waiting[blocks] == 0)
        if len(free):  # those in between are free too: what is beside a span shares only its first and last page
            with suppress(OSError):  # locked in memory
                self._advise(mmap.MADV_DONTNEED, int(free[0]), int(free[-1]) + 1)

    def _is_light(self, span: Span) -> bool:
        return self.in_memory and not self.keep and span[1] - span[0] < TOGETHER

    def _advise(self, option: int, first: int, stop: int) -> None:
        start = first * HUGE
        advise(self._all, option, start, min(stop * HUGE, self._size) - start)


class FileMapping:
    """The first ``size`` bytes of a file, at least one, mapped to be read, or to be ``writable``. It holds no
    descriptor, unlike `mmap.mmap`: a checkpoint has many files.

    ``data`` are the bytes, uint8 [size], mapped for as long as an array refers to them; ``address`` is their first.
    Raises OSError.
    """

    def __init__(self, fd: int, size: int, *, writable: bool = False) -> None:
        start = _map_aligned(fd, size, mmap.PROT_READ | mmap.PROT_WRITE * writable)
        memory = (ctypes.c_ubyte * size).from_address(start)
        self._before_end: list[Callable[[], None]] = []
        weakref.finalize(memory, _unmap, self._before_end, start, size).atexit = False
        self.data: npt.NDArray[np.uint8] = np.frombuffer(memoryview(memory), np.uint8)
        self.data.flags.writeable = writable
        self.address = int(start)
        self._small: list[Span] = []
        self._waiting = 0  # bytes of them
        self._lock = threading.Lock()

    @property
    def view(self) -> memoryview:
        """`data` as a memoryview."""
        return memoryview(self.data)  # type: ignore[arg-type]

    def before_end(self, work: Callable[[], None]) -> None:
        """Do this when nothing refers to the bytes any more, before they are unmapped."""
        self._before_end.append(work)

    def release(self, *runs: Span) -> None:
        """The pages of runs of bytes may go, so that resident memory does not follow the file. Views stay valid.

        Small runs wait for others: neighbors go by one call.
        """
        size = sum(end - first for first, end in runs)
        with self._lock:
            self._small += runs
            self._waiting += size
            if self._waiting < TOGETHER and not (len(runs) == 1 and size >= TOGETHER // 16):
                return
            small, self._small, self._waiting = self._small, [], 0
        self._release(joined_spans(small))

    def _release(self, runs: Iterable[Span]) -> None:
        for first, end in runs:
            # Outward to whole pages: a neighbor's bytes on the first and last page are read again from the page cache.
            page = first - first % mmap.PAGESIZE
            with suppress(OSError):  # locked in memory
                advise(self.data, mmap.MADV_DONTNEED, page, end - page)


def _map_aligned(fd: int, size: int, protection: int) -> int:
    """Map a file at an address that is a multiple of a huge page: only such pages can be mapped as one. -> the address.

    File systems see to it themselves, but not one in memory whose mount asks for no huge pages.
    """
    at, flags = None, mmap.MAP_SHARED
    if size >= HUGE and in_memory(fd):
        reserved = _MMAP(None, size + HUGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1, 0)
        if reserved != _FAILED:
            at, flags = -(-reserved // HUGE) * HUGE, flags | _FIXED
    start = _MMAP(at, size, protection, flags, fd, 0)
    error = ctypes.get_errno()
    if at is not None:  # what is left of the reserved addresses
        end = reserved + size + HUGE
        used = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE if start == at else 0
        for first, last in ((reserved, at), (at + used, end)):
            if first < last:
                _MUNMAP(first, last - first)
    if start == _FAILED:
        raise OSError(error, os.strerror(error))
    return int(start)


def in_memory(fd: int) -> bool:
    """Is the file on a tmpfs?"""
    held = ctypes.create_string_buffer(512)
    if not sys.platform.startswith("linux") or _FSTATFS(fd, held):
        return False
    return ctypes.c_long.from_buffer(held).value == _TMPFS


def _unmap(before: list[Callable[[], None]], start: int, size: int) -> None:
    for work in before:
        work()
    _MUNMAP(start, size)


def joined_spans(spans: Iterable[Span]) -> list[Span]:
    """The same bytes by rising first byte, those that are less than a page apart as one."""
    joined: list[Span] = []
    for first, end in sorted(spans):
        if joined and first - joined[-1][1] < mmap.PAGESIZE:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((first, end))
    return joined


def joined_columns(starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> list[Span]:
    """`joined_spans` of many that do not overlap, given by their first bytes and their ends, int64 [n]."""
    order = np.argsort(starts)
    starts, ends = starts[order], ends[order]
    apart = np.flatnonzero(starts[1:] - ends[:-1] >= mmap.PAGESIZE)
    firsts, lasts = np.concatenate([starts[:1], starts[apart + 1]]), np.concatenate([ends[apart], ends[-1:]])
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


def advise(mapped: npt.NDArray[np.uint8], option: int, start: int, length: int) -> None:
    """`mmap.madvise`, while other threads run: that of the standard library keeps the interpreter's lock.

    ``mapped`` are the bytes of a whole mapping, ``start`` is that of a page. Raises OSError.
    """
    if _LIBC.madvise(address(mapped) + start, length, option):
        raise OSError(ctypes.get_errno(), "madvise")


def _blocks(span: Span) -> slice:
    start, end = span
    return slice(start // HUGE, -(-end // HUGE)) if start < end else slice(0, 0)


def make_huge(fd: int, size: int, cuts: Iterable[int]) -> None:
    """Let a new, sparse file have huge pages where pieces that are written one by one meet: at ``cuts``.

    Elsewhere writing a huge page whole makes it one; in memory `make_huge_span` does. It only takes memory, and the
    system decides.
    """
    blocks = sorted({cut // HUGE for cut in cuts if cut < size})
    if blocks:
        with suppress(OSError):
            _make_huge(fd, size, [(block, block + 1) for block in blocks])


def make_huge_span(fd: int, size: int, span: Span) -> None:
    """The same of all huge pages that lie in a span, before it is written to, where the file is in memory."""
    first, last = -(-span[0] // HUGE), span[1] // HUGE
    if first < last and in_memory(fd):
        with suppress(OSError):
            _make_huge(fd, size, [(first, last)])


def _make_huge(fd: int, size: int, runs: Iterable[Span]) -> None:
    """``runs``: of blocks, first and end. One that has no page yet cannot become huge in memory: it gets its first."""
    collapse, data = in_memory(fd), FileMapping(fd, size, writable=True).data
    advise(data, _HUGEPAGE, 0, size)
    for first, last in runs:
        if not collapse:
            with suppress(OSError):
                advise(data, _POPULATE_READ, first * HUGE, min(last * HUGE, size) - first * HUGE)
            continue
        last = min(last, size // HUGE)
        for block in range(first, last):
            advise(data, _POPULATE_READ, block * HUGE, mmap.PAGESIZE)
        if first < last:
            advise(data, _COLLAPSE, first * HUGE, (last - first) * HUGE)


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all bytes of ``data`` at byte ``offset``, huge page by huge page."""
    while data:
        count = os.pwrite(fd, data[: HUGE - offset % HUGE], offset)
        data, offset = data[count:], offset + count
