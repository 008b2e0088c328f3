"""An anchor, written by all ranks and gathered by none.

Every file has one rank that writes it, from its first byte to its last, so that its sha256 is known when it is stored
and any store will do. What another rank owns comes in pieces of at most PIECE bytes, each a run of the tensor, and is
stored as it arrives: no rank holds more of another's tensor than that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from deltackpt.format.dtypes import DTYPES, storage_shape, uint
from deltackpt.format.layout import Shard
from deltackpt.format.manifest import File
from deltackpt.hooks.plan import FilePlan, Global
from deltackpt.hooks.process_group import ProcessGroup
from deltackpt.torch_views.boxes import Box, runs

PIECE = 8 << 20

Read = Callable[[str], torch.Tensor]  # the words of the box that this rank owns, flat integers on any device
Put = Callable[[str, Iterator[Any]], File]  # path and chunks -> the stored file


class AnchorWriter:
    """Writes every file of ``files``, whose tensors lie as ``plan`` says. ``sent`` and ``received`` count the bytes
    that this rank exchanged with others."""

    def __init__(self, group: ProcessGroup, files: FilePlan, plan: Mapping[str, Global], read: Read) -> None:
        self._group, self._files, self._plan, self._read = group, files, plan, read
        self.sent = self.received = 0
        self._last: tuple[str, Any] = ("", None)
        self.xxh3: dict[str, bytes] = {}  # of the tensors whose files this rank wrote

    def write(self, put: Put) -> dict[str, File]:
        """Store all files; every rank calls it. -> those of this rank by path.

        An error of ``put`` is raised after this rank has sent the other ranks all that they need; StoreError
        ``rank-lost`` where one of them does not answer.
        """
        done: dict[str, File] = {}
        failed: BaseException | None = None
        for i, shard in enumerate(self._files.shards):
            if i % self._group.size != self._group.rank:
                self._serve(shard, i % self._group.size)
                continue
            chunks = self._chunks(shard)
            try:
                if failed is None:
                    done[shard.path] = put(shard.path, chunks)
            except BaseException as error:
                if self._group.size == 1:
                    raise
                failed = error
            for _ in chunks:  # the other ranks send their pieces even if the file failed
                pass
        if failed is not None:
            raise failed
        return done

    def _chunks(self, shard: Shard) -> Iterator[Any]:
        yield shard.header.head
        for tensor in shard.header.tensors:
            known = self._plan[tensor.name]
            hashed = xxhash.xxh3_128()
            for run, shares in self._runs(known):
                block = self._block(tensor.name, known, run, shares)
                hashed.update(block.view(np.uint8).data)
                yield block.view(np.uint8).data
            self.xxh3[tensor.name] = hashed.digest()

    def _block(self, name: str, known: Global, run: Box, shares: list[tuple[int, Box, Box]]) -> npt.NDArray[Any]:
        """One run of a tensor, combined from the ranks that own it: storage elements, flat, as unsigned words."""
        width = DTYPES[known.dtype].width
        if len(shares) == 1 and shares[0][0] == self._group.rank:
            return self._own(name, shares[0][1], run).reshape(-1)
        block = np.empty(run.shape, uint(width))
        for rank, owned, part in shares:
            if rank == self._group.rank:
                block[part.inside(run)] = self._own(name, owned, part)
            else:
                piece = np.empty(part.shape, uint(width))
                self._group.receive(torch.from_numpy(piece.reshape(-1).view(np.uint8)), rank)
                self.received += piece.nbytes
                block[part.inside(run)] = piece
        return block.reshape(-1)

    def _serve(self, shard: Shard, writer: int) -> None:
        """Send what the rank that writes a file needs, in the order in which it receives."""
        for tensor in shard.header.tensors:
            for _, shares in self._runs(self._plan[tensor.name]):
                for rank, owned, part in shares:
                    if rank == self._group.rank:
                        piece = np.ascontiguousarray(self._own(tensor.name, owned, part)).reshape(-1)
                        self._group.send(torch.from_numpy(piece.view(np.uint8).copy()), writer)
                        self.sent += piece.nbytes

    def _own(self, name: str, owned: Box, part: Box) -> npt.NDArray[Any]:
        """``part`` of the box ``owned`` by this rank, in that shape, in host memory."""
        if self._last[0] != name:
            self._last = (name, self._read(name))
        words = self._last[1].reshape(owned.shape)[part.inside(owned)]
        array: npt.NDArray[Any] = words.contiguous().cpu().numpy()
        return array.view(uint(words.element_size()))

    def _runs(self, known: Global) -> Iterator[tuple[Box, list[tuple[int, Box, Box]]]]:
        """The runs of a tensor, each with (rank, box that it owns, the part of the run in that box)."""
        dtype = DTYPES[known.dtype]
        whole = storage_shape(dtype, known.shape)
        owners = known.owners
        if whole != known.shape:  # packed dtypes are never cut: count their storage elements
            owners = tuple((rank, Box.all_of(whole)) for rank, _ in owners)
        for run in runs(whole, max(1, PIECE // dtype.width)):
            met = [(rank, box, part) for rank, box in owners if (part := run.meets(box)) is not None]
            yield run, met
