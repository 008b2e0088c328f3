"""Taking the change of a step: all of it, or, if that is interrupted, none."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from deltackpt.compact.fold import write_anchor
from deltackpt.errors import UsageError
from deltackpt.format.manifest import Link
from deltackpt.format.state_digest import Sums
from deltackpt.hooks.compare import compare
from deltackpt.hooks.mapped import MappedSnapshot
from deltackpt.hooks.pending import Pending
from deltackpt.hooks.process_group import ProcessGroup
from deltackpt.hooks.publish import Publisher
from deltackpt.hooks.state import all_sums
from deltackpt.repository import Repository
from deltackpt.torch_views.delta import Delta
from deltackpt.torch_views.extract import Piece
from deltackpt.torch_views.snapshot import Snapshot
from deltackpt.torch_views.words import from_host
from deltackpt.util.parallel import ordered_map

ALWAYS = 1 << 62  # keep all old words of every tensor that changed


class Capture:
    """Holds the snapshot. Without a step to compare with, the first `take` makes it, and finds no change."""

    def __init__(
        self,
        repo: Repository,
        ref: str,
        where: str | os.PathLike[str],
        team: ProcessGroup,
        pieces: Sequence[Piece],
        link: Link | None,
        *,
        scan_limit: int,
        encoding: str,
        threads: int,
        device: bool | None = None,
    ) -> None:
        self.names = {piece.name for piece in pieces}
        self.threads = threads
        self.lock = threading.Lock()  # held from before a change is taken until it is in the queue
        self._limit = scan_limit if encoding in ("auto", "packed") else ALWAYS
        self._repo, self._ref, self._host = repo, ref, where == "host"
        self._cache = None if where in ("device", "host") else where
        self._pieces = list(pieces)
        self._snapshot: Snapshot | None = None
        self._mapped: MappedSnapshot | None = None
        self._due, self._device = False, device
        if self._cache is not None and team.size > 1:
            need = "'device' or 'host'"
            raise UsageError("snapshot-sharded", where="snapshot", have="a managed cache", need=need)
        if link is not None:
            self._start(pieces, link)

    @property
    def live(self) -> bool:
        """Is there no copy of the weights, so that an anchor is read from themselves?"""
        return self._snapshot is None

    def _start(self, pieces: Sequence[Piece], link: Link | None) -> None:
        if self._cache is None:
            self._snapshot = Snapshot(pieces, host=self._host)
            if there := [p.elements for p in pieces if p.tensor.device.type == "cuda" and self._on_device(p)]:
                from deltackpt.gpu.transfers import reserve

                reserve(sum(there))
        elif link is not None:
            self._mapped = MappedSnapshot(self._repo, self._cache, self._ref, link, self.threads)

    def take(self, pieces: Sequence[Piece]) -> dict[str, Delta]:
        """What changed since the last time; the snapshot is then where the weights are."""
        with self.taking(pieces, lambda: False) as found:
            return found

    @contextmanager
    def taking(self, pieces: Sequence[Piece], kept: Callable[[], bool]) -> Iterator[dict[str, Delta]]:
        """`take`; taken back if an exception ends it or the block, at any instant, unless the change is ``kept``."""
        taken: list[Delta] = []  # each before the snapshot moves: what is on the list can be taken back
        mark = self._mapped.mark() if self._mapped is not None else None
        try:
            yield self._take(pieces, taken)
        except BaseException:
            if not kept():
                if self._snapshot is not None:
                    self._snapshot.restore(taken)
                if self._mapped is not None and mark is not None:
                    self._mapped.go_back(mark)
            raise

    def _take(self, pieces: Sequence[Piece], taken: list[Delta]) -> dict[str, Delta]:
        if self._mapped is not None:
            return self._take_mapped(self._mapped, pieces)
        if self._snapshot is None:
            self._pieces = list(pieces)
            self._start(pieces, None)
            return {}
        there = [piece for piece in pieces if self._on_device(piece)]
        self._take_here(self._snapshot, [piece for piece in pieces if not self._on_device(piece)], taken)
        for where in {piece.tensor.device for piece in there}:
            self._take_there(self._snapshot, [p for p in there if p.tensor.device == where], taken)
        return {delta.name: delta for delta in taken}

    def _on_device(self, piece: Piece) -> bool:
        return piece.tensor.device.type != "cpu" if self._device is None else self._device

    def _take_here(self, snapshot: Snapshot, pieces: Sequence[Piece], taken: list[Delta]) -> None:
        def one(piece: Piece) -> None:
            if (delta := compare(piece, snapshot.array(piece.name), limit=self._limit)) is not None:
                taken.append(delta)
                snapshot.advance(delta)

        for _ in ordered_map(one, pieces, self.threads):
            pass

    def _take_there(self, snapshot: Snapshot, pieces: Sequence[Piece], taken: list[Delta]) -> None:
        from deltackpt.gpu import device

        code = self._limit < ALWAYS
        if snapshot.of(pieces[0].name).device == pieces[0].tensor.device:
            device.take(pieces, snapshot, taken, limit=self._limit, code=code)
        else:
            from deltackpt.gpu.host_snapshot import Stream

            Stream(snapshot, pieces[0].tensor.device, limit=self._limit, code=code).take(pieces, taken)

    def _take_mapped(self, mapped: MappedSnapshot, pieces: Sequence[Piece]) -> dict[str, Delta]:
        found = ordered_map(lambda piece: mapped.compare(piece, self._limit), pieces, self.threads)
        taken = {delta.name: delta for delta in found if delta is not None}
        for delta in taken.values():
            mapped.advance(delta)
        return taken

    def words(self, name: str) -> torch.Tensor:
        """The words of a piece for an anchor: the snapshot's, or the weights' own while `live`."""
        if self._snapshot is not None:
            return self._snapshot.of(name)
        if self._mapped is not None:
            return from_host(self._mapped.array(name), "cpu")
        return next(piece for piece in self._pieces if piece.name == name).words()

    def sums(self) -> dict[str, Sums]:
        """Every piece's share of the digest, of the state that `words` gives; for an anchor without a patch."""
        pieces = self._pieces if self._snapshot is None else self._snapshot.as_pieces(self._pieces)
        return all_sums(pieces, self.threads)

    def published(self, link: Link | None, pending: Pending, anchor: Publisher) -> None:
        """A step is out: a cache follows, and stores it whole if an anchor is due."""
        if self._cache is None or link is None:
            return
        if self._mapped is None:
            self._mapped = MappedSnapshot(self._repo, self._cache, self._ref, link, self.threads)
            return
        with self.lock:
            self._mapped.published(link, [item.deltas for item in pending.after_head()])
        # The policy judged for the step after the last one, which is this one.
        due, self._due, anchor.due = self._due, anchor.due, False
        if due:
            self._due = False
            write_anchor(self._repo, link, cache=self._cache, threads=self.threads)

    def close(self) -> None:
        if self._mapped is not None:
            self._mapped.close()
