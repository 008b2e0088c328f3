"""The tensors of an anchor, wherever its store is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from deltackpt.checkpoint.rows import MappedFiles
from deltackpt.errors import ChainError, DeltackptError
from deltackpt.format.layout import TensorsByName
from deltackpt.format.manifest import File, Manifest
from deltackpt.format.safetensors_header import Tensor
from deltackpt.patch.base import Bytes
from deltackpt.patch.many import TensorRun
from deltackpt.repository import Repository
from deltackpt.restore.source import RepositorySource
from deltackpt.store.held_file import HeldFile
from deltackpt.store.readahead import ObjectRange, ReadAhead
from deltackpt.util.guard import map_guarded
from deltackpt.util.mapped_file import FileMapping

PIECE = 256 << 10  # bytes of a read for which it is not worth to map pages


class Anchor:
    """The tensors of an anchor in its store: mapped where the store is local, read by range where it is not."""

    def __init__(
        self, repo: Repository, step: Manifest, files: Sequence[File] | None = None, order: Iterable[str] = ()
    ) -> None:
        """``files`` if an edge names them, and not the step's own manifest. ``order``: names of tensors that will be
        asked for one after the other, and so can be read ahead; it then has to be closed.
        """
        files = files or step.anchor or ()
        layout = repo.layout(step)
        if [f.size for f in files] != [s.size for s in layout.shards]:  # [F-MAN-9]
            have, need = f"{len(files)} files of other sizes", f"the {len(layout.shards)} shards of the layout"
            raise ChainError("anchor-files", where=f"step {step.step}", have=have, need=need)
        self.tensors: Mapping[str, Tensor] = layout.tensors
        self._store = repo.store
        self._held = [(file.name, shard.header) for file, shard in zip(files, layout.shards, strict=True)]
        self._maps: dict[str, FileMapping] = {}
        # Of a store that is not trusted, all of it is proven first: the digests of tensors withstand no forger.
        self._proven = {} if repo.trust is None else _proven(repo, files)  # [S-SIG-14]
        for file in files if repo.store.capabilities.local and not self._proven else ():
            if (path := repo.store.local_path(file.name)) is not None and repo.store.stat(file.name).size == file.size:
                with path.open("rb") as f:
                    self._maps[file.name], _ = map_guarded(f.fileno(), file.size, path)  # proven as it is used
        here = self._maps.keys() | self._proven.keys()
        ahead = []
        if len(here) < len(files):
            held = ((name, at) for name in order if (at := self._at.get(name)) is not None)
            ahead = [(name, at) for name, at in held if at.length and at.file not in here]
        self.files: MappedFiles | None = None
        if len(self._maps) == len(files) > 0:
            maps = [self._maps[file.name] for file in files]
            self.files = MappedFiles(layout.named, maps.__getitem__, maps.__getitem__)
        self._runs = ReadAhead(repo.store, ahead) if ahead else None

    @cached_property
    def _at(self) -> dict[str, ObjectRange]:
        return {
            t.name: ObjectRange(file, header.data_start + t.start, t.end - t.start)
            for file, header in self._held
            for t in header.tensors
        }

    def bytes_of(self, name: str) -> Bytes:
        """All bytes of a tensor: uint8, read-only, not proven. Raises what `Store.get_range` raises."""
        at = self._at[name]
        if at.file in self._proven:
            return self._proven[at.file][at.start : at.end]
        if at.file in self._maps:
            return self._maps[at.file].data[at.start : at.end]
        if self._runs is not None and (found := self._runs.take(name)) is not None:
            return found
        return np.frombuffer(self._store.get_range(at.file, at.start, at.length) if at.length else b"", np.uint8)

    def side_by_side(self, names: Sequence[str]) -> Bytes | None:
        """See `deltackpt.checkpoint.Checkpoint.side_by_side`: uint8 [n]; None also where the store is not local."""
        places = [self._at[name] for name in names]
        if places[0].file not in self._maps or any(a.end != b.start or a.file != b.file for a, b in pairwise(places)):
            return None
        return self._maps[places[0].file].data[places[0].start : places[-1].end]

    def read_into(self, run: TensorRun) -> bool:
        """Put the bytes of a run's tensors into its ``data`` from `files`, whose tensors are the run's ``named``, past
        their mapping: no page has to be mapped, and unmapped again. False where that is not sooner, or does not work.
        """
        columns = run.named.columns
        shard, first, end = (column[run.numbers] for column in (columns.shard, columns.starts, columns.ends))
        joined = (shard[1:] == shard[:-1]) & (first[1:] == end[:-1])
        begins = [0, *(np.flatnonzero(~joined) + 1).tolist()]
        if len(run.data) < PIECE * len(begins):
            return False
        to = run.starts.tolist()
        for a, b in pairwise([*begins, len(shard)]):
            if not self._read(int(shard[a]), int(first[a]), run.data[to[a] : to[b]]):
                return False
        return True

    def read_part(self, tensor: Tensor, named: TensorsByName, start: int, into: Bytes) -> bool:
        """The same of a tensor's bytes from ``start`` on, as many as there is room for in ``into``, uint8 [n]."""
        number = named.numbers[tensor.name]
        return self._read(int(named.columns.shard[number]), int(named.columns.starts[number]) + start, into)

    def _read(self, number: int, at: int, into: Bytes) -> bool:
        path = self._store.local_path(self._held[number][0])
        if path is None:
            return False
        try:
            with path.open("rb", buffering=0) as file:
                HeldFile(file.fileno(), str(path)).read_into(at, into)
        except (OSError, DeltackptError):  # what is read through the mapping says what is wrong
            return False
        return True

    def release(self, name: str, start: int = 0, end: int | None = None) -> None:
        """See `deltackpt.checkpoint.diff.State`."""
        at = self._at[name]
        first, last = at.start + start, at.end if end is None else at.start + end
        if at.file in self._maps and first < last:
            self._maps[at.file].release((first, last))

    def close(self) -> None:
        """Read nothing more ahead."""
        if self._runs is not None:
            self._runs.close()


def _proven(repo: Repository, files: Sequence[File]) -> dict[str, Bytes]:
    """The bytes of files by name, uint8, proven by sha256: mapped, where the store is remote from temporary copies."""
    source = RepositorySource(repo)
    return {file.name: np.frombuffer(source.part(file), np.uint8) for file in files}
