"""Changes that kernels have found, and that are encoded later, beside the training that goes on.

What was found stays on the device, 4 bytes and a word a change. The snapshot holds the old words until a group is
done: nothing has to be undone of what was not, and the encoder finds what it needs. It is done by whoever wants the
deltas first, at the latest before the next capture.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache

import torch

from deltackpt.gpu.changes import DeviceChanges
from deltackpt.gpu.diff import Group, advance, old_words
from deltackpt.gpu.encode import GridChoice
from deltackpt.gpu.group_deltas import Job, Keep, group_deltas, interleaved
from deltackpt.gpu.transfers import Copy, CopyStream, copy_stream, current, synchronize
from deltackpt.torch_views.delta import CardDelta, CardWords, Delta
from deltackpt.torch_views.snapshot import Snapshot
from deltackpt.util.garbage import collections_put_off


class LateChanges:
    """Groups whose deltas are still to be made, of a snapshot on the same device, which then moves on to them.

    `complete` may be called from any thread, and again after an error. ``nonfinite``, after `count`: how many more
    elements are infinite or NaN, by name of what changed and is not complete.
    """

    def __init__(
        self, snapshot: Snapshot, device: torch.device, found: list[Delta], encoding: str, keep: Keep
    ) -> None:  # fmt: skip
        """Deltas are appended to ``found``, each before the snapshot moves on to it."""
        self.nonfinite: dict[str, int] = {}
        self._snapshot, self._device, self._found, self._keep = snapshot, device, found, keep
        self._choice = GridChoice(encoding)
        self._groups: dict[int, Group] = {}
        self._seen: list[tuple[DeviceChanges, list[list[int]]]] = []  # what was found, and what sums gain by it
        self._lock = threading.Lock()

    def on_card(self) -> list[CardDelta] | None:
        """All that was found, where it is, once it is counted; None where it is not kept there, is of boxes, or some of
        it was completed before. Any thread may ask."""
        found = list[CardDelta]()
        for changes, sums in self._seen:
            for i, part in changes.parts():
                piece, (first, second, _) = changes.pieces[i], sums[i]
                if changes.counts[i]:
                    words = CardWords(changes.positions[part], changes.new[part])
                    both = first % (1 << 64), second % (1 << 64)
                    found.append(CardDelta(piece.name, piece.dtype, piece.box.shape, words, both))
        return found or None

    @property
    def nbytes(self) -> int:
        """Bytes of the changes that are not complete."""
        changes = [group.changes for group in self._groups.values()]
        return sum(c.positions.nbytes + c.new.nbytes for c in changes)

    def add(self, group: Group) -> None:
        """One more, of pieces that it has from their beginnings on. Its bits are freed, and old words: the snapshot has
        them."""
        group.release()
        if group.changes.count:
            group.changes = replace(group.changes, old=group.changes.new[:0])
            self._groups[group.number] = group

    def count(self) -> None:
        """Wait until all was found, and see ``nonfinite``."""
        if not self._groups:
            return
        groups = list(self._groups.values())
        [sums] = Copy([torch.cat([group.sums for group in groups])]).wait()
        rows, at, seen = sums.tolist(), 0, []
        for changes in (group.changes for group in groups):
            mine = rows[at : at + len(changes.pieces)]
            at += len(mine)
            seen.append((changes, mine))
            for piece, changed, (*_, odd) in zip(changes.pieces, changes.counts, mine, strict=True):
                if changed:
                    self.nonfinite[piece.name] = odd
        whole = not any(piece.box.proper for changes, _ in seen for piece in changes.pieces)
        if self._keep == "all" and whole and not self._found:
            self._seen = seen

    def complete(self) -> None:
        """Make the deltas, and move the snapshot on. All that was added has been found, on any stream, by then."""
        with self._lock:
            if not self._groups:
                return
            known = {delta.name for delta in self._found}  # after an error, of what was done before it
            with collections_put_off(), current(self._device), _aside(self._device):
                try:
                    for _ in interleaved(self._jobs(known)):
                        pass
                finally:
                    synchronize(self._device)  # others use the snapshot, on streams of theirs

    def finish(self) -> None:
        """`complete`, and let go of the deltas: nothing more is added."""
        self.complete()
        self._found, self._seen = [], []

    def drop(self) -> None:
        """Forget what is not complete: the snapshot is not at it."""
        with self._lock:
            self._groups.clear()
            self._seen = []

    def _jobs(self, known: set[str]) -> Iterator[Job]:
        side = copy_stream(self._device)
        for number in list(self._groups):
            yield self._job(number, known, side)

    def _job(self, number: int, known: set[str], side: CopyStream | None) -> Job:
        group = self._groups[number]
        changes = group.changes
        if side is not None:
            for tensor in (changes.positions, changes.new, group.offsets, group.sums):
                tensor.record_stream(torch.cuda.current_stream(self._device))
        name = next(piece.name for piece, n in zip(changes.pieces, changes.counts, strict=True) if n)
        if name not in known:
            group.changes = replace(changes, old=old_words(group))
            deltas = yield from group_deltas(group, self._snapshot, self._choice, side, self._keep)
            self._found += deltas
        advance(group)
        del self._groups[number]


def _aside(device: torch.device) -> AbstractContextManager[object]:
    """A stream of its own: what is done later does not wait for the training that was launched before it."""
    return torch.cuda.stream(_stream(device)) if device.type == "cuda" else nullcontext()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all steps: memory that was freed is kept for its stream."""
    return torch.cuda.Stream(device)
