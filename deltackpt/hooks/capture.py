"""Capture the change of a step: all of it, or, if that is interrupted, none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from deltackpt.compaction.fold import write_anchor
from deltackpt.errors import UsageError
from deltackpt.format.manifest import Link
from deltackpt.format.state_digest import Sums
from deltackpt.hooks.anchors import Read
from deltackpt.hooks.compare import compare
from deltackpt.hooks.finite import count_pieces, gain
from deltackpt.hooks.late_deltas import LateDeltas
from deltackpt.hooks.mapped import MappedSnapshot
from deltackpt.hooks.options import HookOptions
from deltackpt.hooks.pending import CapturedStep, Pending
from deltackpt.hooks.publish import Publisher
from deltackpt.hooks.state import all_sums
from deltackpt.repository import Repository
from deltackpt.torch_views.delta import CardDelta, Delta
from deltackpt.torch_views.extract import Piece
from deltackpt.torch_views.snapshot import Snapshot
from deltackpt.torch_views.words import from_host
from deltackpt.util.parallel import ordered_map

if TYPE_CHECKING:
    from deltackpt.gpu.compile_ahead import CompileAhead
    from deltackpt.gpu.group_deltas import Keep
    from deltackpt.gpu.late import LateChanges


@dataclass(frozen=True)
class Captured:
    """What changed, by name, and how many more elements of each are infinite or NaN."""

    deltas: Mapping[str, Delta]
    gains: Mapping[str, int]

    @classmethod
    def of(cls, deltas: Mapping[str, Delta]) -> Captured:
        """Of deltas that are made."""
        return cls(deltas, {name: gain(delta) for name, delta in deltas.items()})


def _finished(late: Sequence[LateChanges], found: list[Delta]) -> dict[str, Delta]:
    for one in late:
        one.finish()
    return {delta.name: delta for delta in found}


def _there(late: Sequence[LateChanges]) -> list[CardDelta] | None:
    """What the cards have of all that changed."""
    found = [one.on_card() for one in late]
    return None if None in found else [delta for some in found for delta in some or ()]


class Capture:
    """Holds the snapshot: the words of ``pieces`` as of the last capture.

    Without a step to compare with (``link`` None), the first capture makes it, and finds no change. A change is encoded
    here, while the old words are at hand, where few elements of a large tensor changed; with any other go its old
    words. Raises UsageError ``snapshot-sharded`` for a managed cache where there are several ``ranks``.
    """

    def __init__(
        self,
        repo: Repository,
        pieces: Sequence[Piece],
        link: Link | None,
        options: HookOptions,
        *,
        ranks: int = 1,
    ) -> None:
        self.names = {piece.name for piece in pieces}
        self.threads = options.threads_or_default
        self.lock = threading.Lock()  # held from before a change is captured until it is in the queue
        self._repo, self._options, self._cache = repo, options, options.cache
        self._pieces = list(pieces)
        self._snapshot: Snapshot | None = None
        self._mapped: MappedSnapshot | None = None
        self._anchor_due = False
        self._late: list[LateChanges] = []  # of the last capture
        self.nonfinite: Mapping[str, int] = {}  # elements of the last captured weights, by tensor
        if self._cache is not None and ranks > 1:
            need = "'device' or 'host'"
            raise UsageError("snapshot-sharded", where="snapshot", have="a managed cache", need=need)
        self.compiling = self._compile_ahead(pieces)
        if link is not None:
            self._start(pieces, link)

    def _compile_ahead(self, pieces: Sequence[Piece]) -> Sequence[CompileAhead]:
        """Begin to compile what the first change needs, where kernels capture it."""
        there = [p for p in pieces if p.tensor.device.type == "cuda" and self._on_device(p)]
        if self._cache is not None or not there:
            return ()
        from deltackpt.gpu.compile_ahead import compile_ahead

        return compile_ahead(there, host=self._options.snapshot == "host")

    @property
    def anchors_from_weights(self) -> bool:
        """Is there no copy of the weights in memory, so that an anchor is read from the weights themselves?"""
        return self._snapshot is None

    def _start(self, pieces: Sequence[Piece], link: Link | None) -> None:
        self.nonfinite = count_pieces(pieces, self.threads)
        if self._cache is None:
            self._snapshot = Snapshot(pieces, host=self._options.snapshot == "host")
            self._prepare_gpus([p for p in pieces if p.tensor.device.type == "cuda" and self._on_device(p)])
        elif link is not None:
            self._mapped = self._map(self._cache, link)

    @staticmethod
    def _prepare_gpus(pieces: Sequence[Piece]) -> None:
        if pieces:
            from deltackpt.gpu.pipeline import warn_without_kernels
            from deltackpt.gpu.transfers import reserve

            reserve(sum(piece.elements for piece in pieces))
            warn_without_kernels(pieces[0].tensor.device)

    def _map(self, cache: object, link: Link) -> MappedSnapshot:
        return MappedSnapshot(self._repo, cache, self._options.ref, link, self.threads)  # type: ignore[arg-type]

    def capture(self, pieces: Sequence[Piece]) -> dict[str, Delta]:
        """What changed since the last capture, by name; the snapshot is then at the present weights."""
        with self.capturing(pieces, lambda: False) as found:
            return dict(found.deltas)

    @contextmanager
    def capturing(self, pieces: Sequence[Piece], queued: Callable[[], bool]) -> Iterator[Captured]:
        """`capture`; undone if an exception ends it or the block, at any instant, unless the change is ``queued``. The
        snapshot is at the present weights once the deltas have been looked at, or by the next call."""
        self._catch_up()
        self._late = []
        found: list[Delta] = []  # each before the snapshot moves: what is on the list can be undone
        overlay = self._mapped.overlay if self._mapped is not None else None
        try:
            yield self._capture(pieces, found)
        except BaseException:
            if not queued():
                for late in self._late:
                    late.drop()
                if self._snapshot is not None:
                    self._snapshot.restore(found)
                if self._mapped is not None and overlay is not None:
                    self._mapped.restore(overlay)
            raise

    def _catch_up(self) -> None:
        """Move the snapshot on to the last step."""
        for late in self._late:
            late.complete()

    def _capture(self, pieces: Sequence[Piece], found: list[Delta]) -> Captured:
        if self._mapped is not None:
            return Captured.of(self._capture_mapped(self._mapped, pieces))
        if self._snapshot is None:
            self._pieces = list(pieces)
            self._start(pieces, None)
            return Captured({}, {})
        there = [piece for piece in pieces if self._on_device(piece)]
        self._capture_on_host(self._snapshot, [piece for piece in pieces if not self._on_device(piece)], found)
        for device in {piece.tensor.device for piece in there}:
            self._capture_on_device(self._snapshot, [p for p in there if p.tensor.device == device], found)
        if not self._late:
            return Captured.of({delta.name: delta for delta in found})
        gains = {delta.name: gain(delta) for delta in found}
        for late in self._late:
            gains |= late.nonfinite
        whole, made = not found, list(self._late)
        return Captured(LateDeltas(partial(_finished, made, found), lambda: _there(made) if whole else None), gains)

    def _on_device(self, piece: Piece) -> bool:
        """Is a piece compared where it is?"""
        return piece.tensor.device.type != "cpu" if self._options.on_device is None else self._options.on_device

    def _capture_on_host(self, snapshot: Snapshot, pieces: Sequence[Piece], found: list[Delta]) -> None:
        def one(piece: Piece) -> None:
            old = snapshot.array(piece.name)
            if (delta := compare(piece, old)) is not None:
                found.append(delta.keeping(old, self._options.encoding))
                snapshot.advance(delta)

        for _ in ordered_map(one, pieces, self.threads):
            pass

    def _capture_on_device(self, snapshot: Snapshot, pieces: Sequence[Piece], found: list[Delta]) -> None:
        from deltackpt.gpu import pipeline

        keep: Keep = getattr(self._options.live, "keeps_on_card", "")
        late = pipeline.find(pieces, snapshot, found, self._options.encoding, keep=keep)
        if late is not None:
            self._late.append(late)

    def _capture_mapped(self, mapped: MappedSnapshot, pieces: Sequence[Piece]) -> dict[str, Delta]:
        found = ordered_map(lambda piece: mapped.compare(piece, self._options.encoding), pieces, self.threads)
        changed = {delta.name: delta for delta in found if delta is not None}
        for delta in changed.values():
            mapped.advance(delta)
        return changed

    def words(self, name: str) -> torch.Tensor:
        """The words of a piece for an anchor, flat integers: the snapshot's, or those of the weights themselves."""
        self._catch_up()
        if self._snapshot is not None:
            return self._snapshot.of(name)
        if self._mapped is not None:
            return from_host(self._mapped.array(name), "cpu")
        return next(piece for piece in self._pieces if piece.name == name).words()

    def sums(self) -> dict[str, Sums]:
        """Every piece's share of the digest, of the state that `words` gives; for an anchor without a patch."""
        self._catch_up()
        pieces = self._pieces if self._snapshot is None else self._snapshot.as_pieces(self._pieces)
        return all_sums(pieces, self.threads)

    def instead(self, captured: CapturedStep, before: Link) -> Read | None:
        """How an anchor of the step after ``before`` is read, where one is due that would be stored afterwards, from
        the managed cache. None too where that is not at ``before``."""
        if self._mapped is None or not self._anchor_due or self._mapped.at != before:
            return None
        return self._mapped.after(captured.deltas)

    def published(self, link: Link | None, pending: Pending, publisher: Publisher) -> None:
        """A step is published: a managed cache follows, and stores it as an anchor if one is due."""
        if self._cache is None or link is None:
            return
        if self._mapped is None:
            self._mapped = self._map(self._cache, link)
            return
        with self.lock:
            self._mapped.published(link, [item.deltas for item in pending.after_head()])
        # The policy judged for the step after the last one, which is this one.
        due, self._anchor_due = self._anchor_due, publisher.due and not publisher.anchored
        publisher.due = False
        if due and not publisher.anchored:
            self._anchor_due = False  # the policy did not know of this one
            write_anchor(self._repo, link, cache=self._cache, threads=self.threads)

    def close(self) -> None:
        """Unmap a managed cache."""
        if self._mapped is not None:
            self._mapped.close()
