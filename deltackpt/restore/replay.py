"""A step's state, rebuilt tensor by tensor from an anchor, or another state, and the patches after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import numpy as np

from deltackpt import kernels
from deltackpt.checkpoint import Checkpoint
from deltackpt.checkpoint.diff import State
from deltackpt.checkpoint.rows import TensorRows
from deltackpt.codecs import DENSE
from deltackpt.codecs.base import Effect
from deltackpt.codecs.packed.native_rebuild import RebuiltPass
from deltackpt.codecs.types import Elements
from deltackpt.errors import ChainError, FormatError
from deltackpt.format.layout import Layout, TensorsByName
from deltackpt.format.safetensors_header import Tensor
from deltackpt.format.tensor_columns import NameRange
from deltackpt.kernels import address, addresses
from deltackpt.patch.apply import changes_elements, decode_step, replace_whole, write_step
from deltackpt.patch.bands import Bands, bands_of
from deltackpt.patch.base import Bytes, Known, Patch, TensorPatch, describe
from deltackpt.patch.many import TensorRun, advance_through, chain_of, changes_of, decode_run, found_in_all
from deltackpt.patch.tensor import names_outside
from deltackpt.repository import Repository
from deltackpt.repository.chain import Plan
from deltackpt.restore.anchor import Anchor
from deltackpt.restore.journal import Journal
from deltackpt.restore.patch_reader import PatchReader
from deltackpt.restore.scratch import SpillBuffer, writable_copy
from deltackpt.util import reuse
from deltackpt.util.spill import room


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
        run = TensorRun(tensors, reuse.empty(sum(t.end - t.start for t in tensors), np.uint8), self.named)
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

    def rebuilding(self, name: str, new: Elements, most: int) -> RebuiltPass | None:
        """See `deltackpt.checkpoint.diff.ReadsRebuilt`: uint words [n]."""
        base = self._base.files if isinstance(self._base, Anchor) else None
        if self._journal is not None or base is None or base.named is not self.named or kernels.LIB is None:
            return None
        run = TensorRun([self.tensors[name]], np.empty(0, np.uint8), self.named)
        if any(changes_of(patch, run.tensors, self.named, run.numbers) * DENSE > len(new) for patch in self._patches):
            return None
        found = found_in_all(self._patches, run)
        if not found or any(one.others for one in found):
            return None
        return RebuiltPass.of(chain_of(found, run), int(base.read(run.numbers).addresses[0]), new, most)

    def bands(self, tensor: Tensor) -> Bands | None:
        """How `write_band` writes a tensor, with bytes; None where it cannot, or where anything is wrong."""
        base = self._base.files if isinstance(self._base, Anchor) else None
        if self._journal is not None or base is None or base.named is not self.named or kernels.LIB is None:
            return None
        return bands_of(self._patches, tensor, self.named)

    def pieces(self, name: str) -> Iterator[Bytes] | None:
        """See `deltackpt.checkpoint.diff.ReadsPieces`: uint8 [n] each."""
        tensor = self.tensors[name]
        bands = self.bands(tensor) if tensor.end > tensor.start else None
        return None if bands is None else self._pieces(tensor, bands)

    def _pieces(self, tensor: Tensor, bands: Bands) -> Iterator[Bytes]:
        memory = reuse.empty(bands.largest, np.uint8)
        for number, (start, end) in enumerate(pairwise(bands.edges)):
            data = memory[: end - start]
            if not self.write_band(tensor, bands, number, data):
                return
            yield data

    def write_band(self, tensor: Tensor, bands: Bands, number: int, data: Bytes) -> bool:
        """Put a band of a tensor, not proven yet, into ``data``, uint8 [n]; False as of `write_run`."""
        assert isinstance(self._base, Anchor)
        return self._base.read_part(tensor, self.named, bands.edges[number], data) and bands.advance(number, data)

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
        if isinstance(self._base, Anchor) and self._base.read_into(run):
            return True
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
