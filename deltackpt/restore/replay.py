"""A step's state, rebuilt tensor by tensor from an anchor, or another state, and the patches after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import pairwise

import numpy as np

from deltackpt import kernels
from deltackpt.checkpoint import Checkpoint
from deltackpt.checkpoint.diff import State
from deltackpt.checkpoint.rows import MappedFiles, TensorRows
from deltackpt.codecs.base import Effect
from deltackpt.errors import ChainError, FormatError
from deltackpt.format.layout import Layout, TensorsByName
from deltackpt.format.manifest import File, Manifest
from deltackpt.format.safetensors_header import Tensor
from deltackpt.format.tensor_columns import NameRange
from deltackpt.kernels import address, addresses
from deltackpt.patch.apply import changes_elements, decode_step, replace_whole, write_step
from deltackpt.patch.base import Bytes, Known, Patch, TensorPatch, describe
from deltackpt.patch.many import TensorRun, advance_through, decode_run, found_in_all
from deltackpt.patch.tensor import names_outside
from deltackpt.repository import Repository
from deltackpt.repository.chain import Plan
from deltackpt.restore.journal import Journal
from deltackpt.restore.patch_reader import PatchReader
from deltackpt.restore.scratch import SpillBuffer, writable_copy
from deltackpt.restore.source import RepositorySource
from deltackpt.store.readahead import ObjectRange, ReadAhead
from deltackpt.util.guard import map_guarded
from deltackpt.util.mapped_file import FileMapping
from deltackpt.util.spill import room


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


def check_left_over(base: Iterable[str], patches: Sequence[Patch], layout: Layout) -> None:
    """Raise ChainError ``tensor-shape`` for a tensor of the result that the layout lacks: what was in the state
    ``base``, by name, or came by one of ``patches``, and was not removed."""
    held = set() if base is layout.tensors else {name for name in base if name not in layout.named.numbers}
    for patch in patches:
        for name in names_outside(patch, layout.named):
            found = patch.tensor(name)
            if found is None or found.effect is Effect.REMOVES:
                held.discard(name)
            else:
                held.add(name)
    if held:  # [F-APPLY-5]
        have = f"a tensor that is left over, of {len(held):,}"
        raise ChainError("tensor-shape", where=min(held)[:80], have=have, need="the tensors of the layout alone")


class Replay:
    """The state of ``layout``: ``base`` with ``patches`` applied, each tensor when it is asked for."""

    def __init__(self, base: State, patches: Sequence[Patch], layout: Layout, journal: Journal | None = None) -> None:
        self.tensors: Mapping[str, Tensor] = layout.tensors
        self._base = base
        self._patches = patches
        self._journal = journal
        self._layout = layout

    @property
    def named(self) -> TensorsByName:
        """All tensors of the state."""
        return self._layout.named

    @classmethod
    @contextmanager
    def open(
        cls,
        repo: Repository,
        plan: Plan,
        base: State | None = None,
        journal: Journal | None = None,
        order: Iterable[str] = (),
    ) -> Iterator[Replay]:
        """Open what the plan needs. Every part is hashed here, before any tensor is rebuilt.

        What is decoded is recorded in ``journal``, if there is one. ``order`` is that of `Anchor`. An anchor is proven
        tensor by tensor, as its bytes are used: where the block raises, its files are hashed, since damage there makes
        all later tensors wrong. Raises FormatError ``object-hash`` then.
        """
        with ExitStack() as stack:
            if base is None:
                anchor = Anchor(repo, plan.anchor or plan.target, plan.whole, order)
                stack.callback(anchor.close)
            patches = stack.enter_context(PatchReader.open_all(repo, plan.patches))
            state, layout = anchor if base is None else base, repo.layout(plan.target)
            try:
                check_left_over(state.tensors, patches, layout)
                yield cls(state, patches, layout, journal)
            except (ChainError, FormatError) as error:
                if base is None and error.code != "object-hash":
                    repo.prove(plan.whole)
                raise

    def bytes_of(self, name: str) -> Bytes:
        """All bytes of a tensor. Not proven yet: compare their xxh3 with the step's digests."""
        want = self.tensors[name]
        if self._journal is None and self._patches and want.end > want.start:
            run = TensorRun([want], room(want.end - want.start), self.named)
            if self.write_run(run):
                return run.data
        *_, (current, known) = self.history(name)
        if current is None or known != (want.dtype, want.shape):  # [F-APPLY-5]
            need = describe((want.dtype, want.shape)) + " by the layout"
            raise ChainError("tensor-shape", where=name[:80], have=describe(known), need=need)
        return current

    def read_many(self, names: Sequence[str]) -> tuple[Sequence[Bytes], Sequence[int]]:
        """`bytes_of` of each tensor, [n] uint8, and the address of its first one."""
        tensors = [self.tensors[name] for name in names]
        run = TensorRun(tensors, np.empty(sum(t.end - t.start for t in tensors), np.uint8), self.named)
        if not tensors or self._journal is not None or not self.write_run(run):
            data = [self.bytes_of(name) for name in names]
            return data, addresses(*data)
        at = run.starts.tolist()
        return [run.data[a:b] for a, b in pairwise(at)], [address(run.data) + first for first in at[:-1]]

    def read_range(self, names: NameRange) -> TensorRows:
        """`bytes_of` of each tensor of a range of ``named``."""
        data, at = self.read_many(names)
        return TensorRows(np.array(at, np.int64), data.__getitem__)

    def release_range(self, names: NameRange) -> None:
        """Of what was read alone: a run was released when it was copied."""
        files = self._base.files if isinstance(self._base, Anchor | Checkpoint) else None
        if files is not None and files.named is self.named:
            files.release(names.rows)
        else:
            self.release_many(names)

    def release_many(self, names: Sequence[str]) -> None:
        """`release` of each."""
        for name in names:
            self.release(name)

    def write_run(self, run: TensorRun) -> bool:
        """Put the state of a run's tensors, not proven yet, into its ``data``.

        False where that cannot be done at once, or where anything is wrong: `bytes_of` then gives them, or says what.
        """
        if self._journal is None:  # what cannot be done is known before anything is read
            found = found_in_all(self._patches, run) if kernels.LIB is not None else None
            return found is not None and self.read_base(run) and advance_through(found, run)
        if not self.read_base(run):
            return False
        for k, patch in enumerate(self._patches):
            if (changes := decode_run(patch, run)) is None:
                return False
            self._journal.append_run(run.numbers, k, changes)
            changes.write_to(run)
        return True

    def read_base(self, run: TensorRun) -> bool:
        """Put a run's tensors before the first patch into its ``data``. False where one is not of its dtype and shape.

        What they were read from is released.
        """
        if self._copy_rows(run):
            return True
        tensors, names = self._base.tensors, [tensor.name for tensor in run.tensors]
        metas = [tensors.get(name) for name in names]
        for tensor, meta in zip(run.tensors, metas, strict=True):
            if meta is None or meta.dtype != tensor.dtype or meta.shape != tensor.shape:
                return False
        whole = self._base.side_by_side(names) if isinstance(self._base, Anchor | Checkpoint) else None
        if whole is not None:
            run.data[:] = whole
            self._base.release(names[0], 0, len(whole))
            return True
        for number, name in enumerate(names):
            run.bytes_of(number)[:] = self._base.bytes_of(name)
            self._base.release(name)
        return True

    def _copy_rows(self, run: TensorRun) -> bool:
        """`read_base` by one call, where the base has the same tensors in files that are mapped."""
        files = self._base.files if isinstance(self._base, Anchor | Checkpoint) else None
        if files is None or files.named is not run.named or kernels.LIB is None:
            return False
        rows = files.read(run.numbers)
        to, sizes = run.places.T
        kernels.copy_many(np.array([to, rows.addresses, sizes]).T)
        files.release(run.numbers)
        return True

    def history(self, name: str) -> Iterator[tuple[Bytes | None, Known | None]]:
        """The tensor before the first patch and after each: bytes (written to by the next step), dtype and shape."""
        current = self._base.bytes_of(name) if name in self._base.tensors else None
        meta = self._base.tensors.get(name)
        known = (meta.dtype, tuple(meta.shape)) if meta else None
        yield current, known
        for k, patch in enumerate(self._patches):
            if (found := patch.tensor(name)) is not None:
                if current is None or known is None or not changes_elements(known, found):
                    current, known = replace_whole(found)
                else:
                    current = self._changed(name, k, current, known, found)
            yield current, known

    def _changed(self, name: str, k: int, current: Bytes, known: Known, found: TensorPatch) -> Bytes:
        """The tensor after patch ``k``, recorded in the journal if there is one: ``current`` itself if it may be."""
        decoded = None
        if self._journal is not None:
            decoded = decode_step(current, known, found, SpillBuffer())
            assert decoded is not None
            self._journal.append(self.named.numbers[name], k, decoded)
        if not current.flags.writeable:
            current = writable_copy(current)
            self.release(name)
        if decoded is not None:
            decoded.write_to(current.view(decoded.values.dtype))
        else:
            write_step(current, known, found)
        return current

    def release(self, name: str, start: int = 0, end: int | None = None) -> None:
        """See `deltackpt.checkpoint.diff.State`."""
        if name in self._base.tensors:
            self._base.release(name, start, end)
